"""Any checkpoint into any format that can be written.

job = Job(source, target, "safetensors", ...)       what is wanted, as a value that worker processes get
writer = job.writer(job.state(), job_id)            the state, opened lazily, and the plan of the files
journal                                             which of them are done, so that a second call continues
"""
