"""A service from one file: the deployment file, what it renders to, and how it gets onto a host and back off it."""

from ddtree.deploy.deployment import Deployment, json_schema, load_deployment, parse_deployment, to_deployment

__all__ = ["Deployment", "json_schema", "load_deployment", "parse_deployment", "to_deployment"]
