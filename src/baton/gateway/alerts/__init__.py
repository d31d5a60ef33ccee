"""Alerts of a fleet: what is wrong with links, handoffs, the store, predictions and targets.

Enters: what the gateway knows of its workers and requests. Leaves: `GET /alerts`, a log line when
an alert begins to fire and when it is resolved, `baton_alert_firing`, a webhook's notifications.

File map:
    sources.py       what the gateway knows now → `Observations`
    observations.py  `Observations`: values only
    rules.py         `AlertRules`: observations → the conditions that hold, pure
    link_loss.py     `LinkLossRule`: which links lose packets, pure
    windows.py       growth of counters, and shares of an error budget, within the last minutes
    lifecycle.py     `AlertLifecycle`: pending → firing → resolved, pure
    monitor.py       `AlertMonitor`: runs all of it, and shows it
    webhook.py       notifications in Alertmanager's format
"""
