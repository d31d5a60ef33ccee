"""What would be, without starting anything: sizes of KV, and times to move it.

File map:
    sizing.py  a model and links → a report; printing.py: for people; which model is meant: a
               shipped config, a file, a folder, numbers by hand
    links.py   links by their data sheets; measured.py: links by `baton bench link --json`
"""
