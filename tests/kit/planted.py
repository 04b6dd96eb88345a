"""Secrets of many kinds. Each has its kind's shape, put together here so that no scanner takes it for a leak."""

import base64

UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOWER = UPPER.lower()
MIXED = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA"
HEX = "0123456789abcdef" * 4

PLANTED = {
    "hugging face": "hf_" + MIXED,
    "openai": "sk-" + "proj-" + MIXED,
    "anthropic": "sk-" + "ant-api03-" + MIXED,
    "nvidia": "nvapi-" + MIXED,
    "google": "AIza" + (MIXED + "abc"),
    "github": "ghp_" + (MIXED + "abcd"),
    "github fine": "github_pat_" + MIXED + "_" + MIXED,
    "gitlab": "glpat-" + MIXED[:20],
    "slack": "xoxb-" + "123456789012-" + MIXED,
    "slack hook": "https://hooks.slack.com/" + "services/T00000000/B00000000/" + MIXED[:24],
    "aws id": "AKIA" + "ABCDEFGHIJ234567",
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9." + MIXED,
    "stripe": "sk_live_" + MIXED[:24],
    "sendgrid": "SG." + MIXED[:22] + "." + (MIXED + MIXED)[:43],
    "twilio": "SK" + HEX[:32],
    "pypi": "pypi-" + "AgEIcHlwaS5vcmc" + MIXED * 3,
    "npm": "npm_" + MIXED + "abcd",
    "telegram": "123456789:AA" + (MIXED + "abc")[:33],
    "vault": "hvs." + MIXED,
    "azure": "AccountKey=" + base64.b64encode(bytes(range(64))).decode(),
    "databricks": "dapi" + HEX[:32],
    "private key": "-----BEGIN OPENSSH "
    + "PRIVATE KEY-----\nb3BlbnNzaC1rZXk\nAAAA\n-----END OPENSSH "
    + "PRIVATE KEY-----",
    "xai": "xai-" + MIXED * 2,
    "perplexity": "pplx-" + HEX[:48],
    "fireworks": "fw_" + MIXED[:24],
    "digitalocean": "dop_v1_" + HEX,
    "grafana": "glsa_" + MIXED + "_01234567",
    "mailgun": "key-" + HEX[:32],
    "password hash": "$6$saltsalt$" + (MIXED * 3)[:86],
    "square": "sq0csp-" + (MIXED + MIXED)[:43],
    "mailchimp": HEX[:32] + "-us12",
}
