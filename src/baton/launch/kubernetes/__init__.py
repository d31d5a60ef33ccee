"""A release of the Helm chart on Kubernetes, as its operator or the autoscaler controls it.

Enters: an operator's requests. Leaves: changed numbers of replicas, restarted rollouts, evicted
pods; Kubernetes' own controllers start and end the processes.

File map:
    kubeconfig.py    credentials of an operator, as kubectl has them
    exec_plugin.py   credentials that another program makes
    cluster.py       which API server and namespace: kubeconfig, or this pod's
    objects.py       pods, StatefulSets and Deployments, as the API has them (pure)
    api.py           the requests; their errors
    members.py       a pod as a process of the fleet: role, state, and why (pure)
    sizes.py         how a role's workers are divided between its StatefulSets (pure)
    waiting.py       until pods are ready, are gone, or are replaced
    fleet.py         the `FleetControl`
    backend.py       finds a release
"""
