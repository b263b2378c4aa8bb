"""`distill plan` and `init`: what a configuration takes and how fast it goes, before it is started.

estimate    a configuration's roles and stages → step, age, weight sync, record, hours
measured    a finished run in place of the assumptions
forecast    all of it for one configuration, as `distill.plan` returns it, and what people read of it
starter     `distill init`: a configuration to begin with
"""
