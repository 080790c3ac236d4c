"""SCOUT for torchtitan 0.2.2: switched on by a job-config flag, no change to anybody's code.

`job_config` is the module that `[job] custom_config_module` names; it is all that is imported while
`[scout] enable` is false.
"""
