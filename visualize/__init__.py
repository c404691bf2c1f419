"""Pictures of schedules, timelines and losses."""
