{{- /* Parts of pods. Arguments: a dict with `top` (the chart) and what each one names. */}}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001          # secrets below are readable by this group, and by nobody else
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* `override`: what a pool changes of it. */}}
{{- define "baton.containerSecurity" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
{{- include "baton.merged" (dict "base" $context "changes" (.override | default dict)) }}
{{- end }}

{{- /* Variables of every process. `identity`: the name of a Secret, or empty. */}}
{{- define "baton.env" -}}
- {name: BATON_CONFIG, value: /etc/baton/config/baton.toml}
- {name: BATON_SECURITY__TLS, value: {{ .top.Values.security.tls | quote }}}
{{- if .top.Values.clusterKeySecret }}
- {name: BATON_CLUSTER__KEY_FILE, value: /etc/baton/cluster/key}
{{- end }}
{{- if .identity }}
- {name: BATON_SECURITY__IDENTITY, value: /etc/baton/identity}
{{- end }}
{{- if not (or .identity .top.Values.clusterKeySecret) }}
{{- fail "clusterKeySecret is empty: then both security.gatewayIdentitySecret and security.workerIdentitiesSecret are needed" }}
{{- end }}
# The root filesystem is read-only, and the user has no entry in /etc/passwd.
- {name: HOME, value: /tmp/home}
- {name: USER, value: baton}
{{- end }}

{{- /* `config`: the ConfigMap's name; `identity` as above; `model`: whether it is mounted.
     `identityOf`: pods with an identity each, of which a pod sees that in `identityPath` alone. */}}
{{- define "baton.mounts" -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
{{- if .top.Values.clusterKeySecret }}
- {name: cluster-key, mountPath: /etc/baton/cluster, readOnly: true}
{{- end }}
{{- if .identity }}
- {name: identity, mountPath: /etc/baton/identity, readOnly: true{{ with .identityPath }}, subPathExpr: {{ . | quote }}{{ end }}}
{{- end }}
{{- if and .model .top.Values.model.volume }}
- {name: model, mountPath: {{ .top.Values.model.mountPath | quote }}, readOnly: true}
{{- end }}
- {name: scratch, mountPath: /tmp}
{{- end }}

{{- define "baton.volumes" -}}
- name: config
  configMap: {name: {{ .config | quote }}}
{{- if .top.Values.clusterKeySecret }}
- name: cluster-key
  secret:
    secretName: {{ .top.Values.clusterKeySecret | quote }}
    defaultMode: 0440
    items: [{key: key, path: key}]
{{- end }}
{{- if .identity }}
- name: identity
  secret:
    secretName: {{ .identity | quote }}
    defaultMode: 0440
    {{- with .identityOf }}
    items:
    {{- range . }}
      - {key: {{ . }}.tls.crt, path: {{ . }}/tls.crt}
      - {key: {{ . }}.tls.key, path: {{ . }}/tls.key}
      - {key: ca.crt, path: {{ . }}/ca.crt}
      - {key: ca.crl, path: {{ . }}/ca.crl}
    {{- end }}
    {{- end }}
{{- end }}
{{- if and .model .top.Values.model.volume }}
- name: model
  {{- toYaml .top.Values.model.volume | nindent 2 }}
{{- end }}
- name: scratch
  emptyDir: {sizeLimit: {{ .scratch | quote }}}
{{- end }}

{{- /* Where pods run. `of`: the values of a gateway or pool; `nodeSelector`: the whole of it. */}}
{{- define "baton.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .top.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Of a pool of one role: near the pods of the other one. Both prefer that; only prefill's can
     require it, since the first pods of two pools that require each other would wait without end. */}}
{{- define "baton.poolAffinity" -}}
{{- $other := index (dict "prefill" "decode" "decode" "prefill" "both" "") .pool.role }}
{{- $near := .top.Values.topology.near }}
{{- if and $other (ne $near "none") }}
podAffinity:
  {{- if and (eq $near "required") (eq .pool.role "prefill") }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: {{ .top.Values.topology.zoneLabel }}
      labelSelector:
        matchLabels: {{ include "baton.selector" .top | nindent 10 }}
          baton/role: {{ $other }}
  {{- end }}
  preferredDuringSchedulingIgnoredDuringExecution:
    {{- $keys := list .top.Values.topology.zoneLabel .top.Values.topology.rackLabel "kubernetes.io/hostname" }}
    {{- range $at, $key := $keys }}
    {{- if $key }}
    - weight: {{ index (list 100 50 25) $at }}
      podAffinityTerm:
        topologyKey: {{ $key }}
        labelSelector:
          matchLabels: {{ include "baton.selector" $.top | nindent 12 }}
            baton/role: {{ $other }}
    {{- end }}
    {{- end }}
{{- end }}
{{- end }}

{{- /* Of a pool: `resources` with GPUs, RDMA devices and huge pages. */}}
{{- define "baton.resources" -}}
{{- $limits := deepCopy (.pool.resources.limits | default dict) }}
{{- if .pool.gpus }}{{ $_ := set $limits .pool.gpuResource (int .pool.gpus) }}{{ end }}
{{- with .pool.rdma }}{{ if .resource }}{{ $_ := set $limits .resource (int .count) }}{{ end }}{{ end }}
{{- with .pool.hugepages }}{{ if .size }}{{ $_ := set $limits (printf "hugepages-%s" .size) .amount }}{{ end }}{{ end }}
{{- with .pool.resources.requests }}
requests: {{ toYaml . | nindent 2 }}
{{- end }}
limits: {{ toYaml $limits | nindent 2 }}
{{- end }}

{{- /* Of a pool: where the rack is, in the node selector and in the worker's topology. */}}
{{- define "baton.poolNodeSelector" -}}
{{- $selector := deepCopy (.pool.nodeSelector | default dict) }}
{{- if .pool.zone }}{{ $_ := set $selector .top.Values.topology.zoneLabel .pool.zone }}{{ end }}
{{- if .rack }}{{ $_ := set $selector (required "topology.rackLabel: pools name racks, so name the nodes' label" .top.Values.topology.rackLabel) .rack }}{{ end }}
{{- toYaml $selector }}
{{- end }}

{{- define "baton.topologyEnv" -}}
{{- if .pool.zone }}
- {name: BATON_TOPOLOGY_ZONE, value: {{ .pool.zone | quote }}}
{{- else }}
# Kubernetes 1.35 and newer copy the node's zone to the pod; else this is empty, and not known.
- name: BATON_TOPOLOGY_ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .top.Values.topology.zoneLabel }}']"}}
{{- end }}
{{- if .rack }}
- {name: BATON_TOPOLOGY_RACK, value: {{ .rack | quote }}}
{{- else if .top.Values.topology.rackLabel }}
- name: BATON_TOPOLOGY_RACK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .top.Values.topology.rackLabel }}']"}}
{{- end }}
- {name: BATON_TOPOLOGY_HOST, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- end }}
