"""Evidence that a running server does what was declared: probes, declared against effective, and a verdict."""

from ddtree.verify.expectation import Expectation, from_deployment
from ddtree.verify.finding import Finding, Status, Verdict
from ddtree.verify.run import Verification, checked_url
from ddtree.verify.session import Options

__all__ = ["Expectation", "Finding", "Options", "Status", "Verdict", "Verification", "checked_url", "from_deployment"]
