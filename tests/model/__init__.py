"""The one-process model against definitions, finite differences and Hugging Face's Llama."""
