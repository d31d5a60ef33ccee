"""Kubernetes' own schemas, against which objects are validated. Each is read once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import kubernetes_validate
from kubernetes_validate import ValidationError, utils

if TYPE_CHECKING:
    from tests.deploy.manifests import Object

__all__ = ["ValidationError", "validate"]

# It reads two files of megabytes for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


def validate(found: Object, version: str = "1.30") -> None:
    """Also against fields that this version of Kubernetes does not know.

    Raises:
        ValidationError: it is not valid.
    """
    kubernetes_validate.validate(found, version, strict=True)
