"""Real bugs of distributed training and inference, each as a small fault that can be run. In reading order:

exhibit.py       an exhibit: the fault, its story, and the check that finds it
mesh_faults.py   faults in the library, found by `verify` and visible in the loss curve of a training run
floor_faults.py  faults in `minipar.simple`, and snippets found in tutorials, found by a specification
serving.py       an exhibit of inference: compares the texts of requests served together with those served alone
serving_faults.py  faults in the library's inference engine
drawing.py       a drawing of a pipeline that cannot exist
gallery.toml     the story of each exhibit, by symptom
gallery.py       all exhibits: gallery.toml joined with the faulty code
command.py       `minipar museum`
"""
