{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* `base` with `changes`: maps are merged, all else is replaced, by what is empty too, which
     mergeOverwrite leaves out. */}}
{{- define "baton.merged" -}}
{{- $merged := deepCopy .base }}
{{- range $key, $value := .changes }}
{{- if and (kindIs "map" $value) (hasKey $merged $key) }}
{{- $_ := set $merged $key (include "baton.merged" (dict "base" (index $merged $key) "changes" $value) | fromYaml) }}
{{- else }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- end }}
{{- toYaml $merged }}
{{- end }}

{{- define "baton.image" -}}
{{ required "image.repository: build an image with deploy/Containerfile, push it, and name it" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What a gateway watches: each pool's Service, with the pool's role. */}}
{{- define "baton.members" -}}
{{- $members := list }}
{{- $decodes := false }}
{{- range $name, $pool := .Values.pools }}
{{- $role := $pool.role | default $.Values.poolDefaults.role }}
{{- if ne $role "prefill" }}{{ $decodes = true }}{{ end }}
{{- $members = append $members (printf "kubernetes:%s=%s-%s:http" $role $.Release.Name $name) }}
{{- end }}
{{- if not $decodes }}{{ fail "pools: no pool decodes; name one with the role decode or both (values/ has examples)" }}{{ end }}
{{- join "," $members }}
{{- end }}

{{- define "baton.scheme" -}}
{{ ternary "http" "https" (eq .Values.security.tls "off") }}
{{- end }}

{{- /* Components that have a management port, with metrics and demand: separated by spaces. */}}
{{- define "baton.managed" -}}
gateway{{ if .Values.picker.enabled }} picker{{ end }}
{{- end }}
