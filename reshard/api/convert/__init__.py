"""Writing a lazy checkpoint in another format: what each file holds, and how its bytes are streamed.

job = Job(source, target, "safetensors", ...)       # what is wanted, as a value
exporter = job.exporter()                            # the state, opened lazily, and the plan of the files
for file in exporter.files: exporter.write(storage, file)
exporter.finish(storage, done)                       # publishes: before that, there is no checkpoint
"""
