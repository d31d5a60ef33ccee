"""`/dashboard`: a page for operators, and the stream of events that it draws.

pages.py     answers requests below /dashboard/: files, the stream
static/      the page itself: HTML, CSS and JavaScript modules, uPlot
events.py    what the stream's events have
snapshot.py  makes the events from the gateway's other pages
series.py    one point a second of what is drawn over time, and the latest minutes of them
stream.py    one snapshot a second for all viewers, as server-sent events
"""
