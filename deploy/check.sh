#!/usr/bin/env bash
# Checks the Dockerfile, the compose file and the manifests without a daemon or a cluster.
# Tools come from check-requirements.txt into an environment of their own. Any finding fails.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-deploy
rendered=build/deploy
failed=0

# Run a command under a headline; a failure is noted, and the rest still runs.
check() {
    echo "== $1"
    shift
    if "$@"; then echo "ok"; else failed=1; fi
}

render() {
    kubectl kustomize "$1" >"$2"
}

if ! cmp -s deploy/check-requirements.txt "$venv/installed.txt"; then
    echo "== tools"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/pip" install -qq --disable-pip-version-check -r deploy/check-requirements.txt
    cp deploy/check-requirements.txt "$venv/installed.txt"
fi
PATH=$PWD/$venv/bin:$PATH
mkdir -p "$rendered"

# --skip-download: checkov would ask its vendor for guidelines.
checkov=(checkov --quiet --compact --skip-download --framework)

check "scripts: shellcheck" shellcheck deploy/check.sh
check "Dockerfile: hadolint" hadolint deploy/Dockerfile
check "Dockerfile: checkov" "${checkov[@]}" dockerfile -f deploy/Dockerfile
check "compose: docker-compose config" docker-compose -f deploy/compose.yaml config --quiet
check "compose: checkov" "${checkov[@]}" secrets -f deploy/compose.yaml
for overlay in k8s k8s/cpu; do
    manifests=$rendered/${overlay//\//-}.yaml
    check "$overlay: kubectl kustomize" render "deploy/$overlay" "$manifests"
    check "$overlay: kubernetes-validate" kubernetes-validate --strict --quiet "$manifests"
    check "$overlay: checkov" "${checkov[@]}" kubernetes secrets -f "$manifests"
done

if ((failed)); then
    echo "deployment files: there are findings, see above" >&2
    exit 1
fi
echo "deployment files: no findings"
