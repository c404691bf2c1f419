"""Real bugs of distributed training, each as a small fault that can be run. In reading order:

exhibit.py       an exhibit: the fault, its story, what shows it
mesh_faults.py   faults in the library, shown by `verify` and by the loss curve of a training
floor_faults.py  faults in `minipar.simple`, and snippets as tutorials have them, shown by a specification
drawing.py       a drawing of a pipeline that cannot be
gallery.py       all exhibits, by symptom
command.py       `minipar museum`
"""
