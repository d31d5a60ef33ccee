"""What an operator looks at: today the doctor, which reports what works on a host and why not.

File map:
    doctor/   `baton doctor`: probes of this host, or of a running fleet → findings
"""
