"""What secrets look like: names that tell of one, shapes that keys and tokens have, places where one stands."""

from __future__ import annotations

import re

_TELLING = re.compile(
    r"(?i)(^|[_.\-])(api_?keys?|apikey|access_?keys?(_id)?|secrets?(_?key)?|secret_access_key|auth_?key|account_?key|"
    r"(master|deploy|ssh|license|licence|hmac|session|service|shared|root|admin|app|encryption|signing)_?key|"
    r"(private|client|tls|server)_?key(_?data)?|token|"
    r"pass_?words?|passwd|passphrase|pass|pwd|pw|client_?secret|credentials?|creds|(basic|http|registry)_?auth|"
    r"webhook(_url)?|connection_?string|dsn|authorization|cookie)$"
)
_A_PASSWORD = re.compile(r"(?i)(^|[_.\-])(pass_?words?|passwd|passphrase|pass|pwd|pw|pin)$")
# Tokens of text are no tokens of access.
_NOT_TELLING = re.compile(
    r"(?i)(^|[_.])(bos|eos|pad|unk|mask|sep|cls|image|video|audio|special|stop|next|start|end|first|last|draft|bonus|root|"
    r"per|each|new|prompt|completion|output|input|decoder|fim|think|tool)_token$|^(old_?)?pwd$|^(load|set)_credential$|"
    r"(^|[_.])(forward|backward|first|second|two|one|single|multi|by)_?pass$"
)
_ONE_OF_SEVERAL = re.compile(r"(?<=[A-Z])_?(V?[0-9]+|OLD|NEW|PROD|DEV|STAGING|TEST|BACKUP)$")
_RANDOM = re.compile(r"(?=[A-Z0-9+]*[a-z])(?=[a-z0-9+]*[A-Z])(?=[A-Za-z+]*\d)[A-Za-z0-9+]{16,}")
_NUMBER = re.compile(r"\d{1,6}(\.\d+)?")
_NOT_SECRET = re.compile(
    r"(?i)^(|=*v?\d+(\.\d+)+\S{0,16}|\*+|\*\*\*masked\*\*\*|none|null|true|false|yes|no|on|off|auto|default|empty|\$\{?\w+\}?|"
    r"<[^>]*>|[\[({].*|str|int|bytes|bool|float|any|self|optional.*|required|missing|not|is|must|for|of|and|or|in|"
    r"from|with|has|was|the|a|an)$"
)

SHAPES: dict[str, str] = {
    "private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    "Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "OpenAI or Anthropic key": r"\bsk-[A-Za-z0-9_-]{16,}",
    "NVIDIA key": r"\bnvapi-[A-Za-z0-9_-]{20,}",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Google OAuth secret": r"\bGOCSPX-[0-9A-Za-z_-]{20,}|\bya29\.[0-9A-Za-z_-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "GitLab token": r"\bgl(?:pat|dt|rt|ptt|soat|agent|cbt|ft|imt)-[A-Za-z0-9_-]{16,}",
    "Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{10,}",
    "Slack webhook": r"https://hooks\.slack\.com/[A-Za-z0-9/_-]{10,}",
    "Discord webhook": r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/[^\s\"'\\]+",
    "AWS key id": r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}\b",
    "Azure account key": r"(?i)\baccountkey=[A-Za-z0-9+/=]{40,}",
    "Azure signature": r"(?i)\bsig=[A-Za-z0-9%+/=]{20,}",
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
    "PyPI token": r"\bpypi-[A-Za-z0-9_-]{16,}",
    "npm token": r"\bnpm_[A-Za-z0-9]{30,}",
    "Stripe key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "SendGrid key": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "Twilio key": r"\b(?:AC|SK)[0-9a-f]{32}\b",
    "Telegram bot token": r"\b\d{8,10}:AA[A-Za-z0-9_-]{32,}",
    "Vault token": r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}",
    "Databricks token": r"\bdapi[0-9a-f]{32}\b",
    "Docker token": r"\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "Tailscale key": r"\btskey-[A-Za-z0-9-]{16,}",
    "Replicate token": r"\br8_[A-Za-z0-9]{30,}",
    "Groq key": r"\bgsk_[A-Za-z0-9]{30,}",
    "xAI key": r"\bxai-[A-Za-z0-9]{20,}",
    "Perplexity key": r"\bpplx-[A-Za-z0-9]{20,}",
    "Fireworks key": r"\bfw_[A-Za-z0-9]{20,}",
    "LangSmith key": r"\blsv2_(?:pt|sk)_[A-Za-z0-9_]{20,}",
    "Tavily or Jina key": r"\b(?:tvly-|jina_)[A-Za-z0-9_-]{20,}",
    "ElevenLabs key": r"\bsk_[0-9a-f]{40,}\b",
    "Weights & Biases key": r"\bwandb_v\d_[A-Za-z0-9_]{20,}",
    "Linear key": r"\blin_(?:api|oauth)_[A-Za-z0-9]{30,}",
    "DigitalOcean token": r"\bdo[opr]_v1_[0-9a-f]{40,}",
    "Shopify token": r"\bshp(?:at|ss|ca|pa)_[0-9a-fA-F]{32}",
    "Mailgun key": r"\bkey-[0-9a-f]{32}\b",
    "Grafana token": r"\bgl(?:sa|c)_[A-Za-z0-9+/=_]{30,}",
    "New Relic key": r"\bNR(?:AK|JS|II)-[A-Za-z0-9-]{20,}",
    "Atlassian token": r"\bATATT3[A-Za-z0-9_=-]{30,}",
    "signing secret of a webhook": r"\bwhsec_[A-Za-z0-9+/=]{20,}",
    "hash of a password": r"\$(?:[156y]|2[aby]|argon2id?|scrypt)\$[^\s:'\"]{16,}",
    "PuTTY key": r"(?m)^Private-Lines: \d+\n(?:[A-Za-z0-9+/=]+\n?)+",
    "age key": r"\bAGE-SECRET-KEY-1[A-Z0-9]{50,}",
}
_WORDS = "password|passwd|passphrase|secret|token|api[_-]?key|credential"
# The last group of each is what is taken out.
PLACES: dict[str, str] = {
    "password in an address": r"(?i)\b[a-z][a-z0-9+.-]{1,20}://[^\s:/@'\"]*:([^\s@/'\"]+)@",
    "user token in an address": r"(?i)\bhttps?://([A-Za-z0-9_-]{16,})@",
    "Authorization header": r"(?i)\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token|digest)?\s*"
    r"([A-Za-z0-9._~+/=-]{8,})",
    "bearer token": r"(?i)\bbearer[ \t]+([A-Za-z0-9._~+/=-]{8,})",
    "netrc password": r"(?i)\bmachine\s+\S+\s+login\s+\S+\s+password\s+(\S+)",
    "password on a command line": r"\b(?:mysql\w*|mariadb\w*|sshpass|mongo\w*)\b[^\n|;]{0,200}?\s-p ?['\"]?"
    r"([^\s'\"]{4,})",
    "password for openssl": r"-pass(?:in|out)?[ =]['\"]?pass:([^\s'\"]{4,})",
    "signature or key in an address": r"(?i)[?&](?:key|sig|signature|x-(?:amz|goog)-signature)=([^&\s'\"]{8,})",
    "registry login": r"[\"']auth[\"']\s*:\s*[\"']([A-Za-z0-9+/=]{8,})[\"']",
    "element that tells": rf"(?i)<[\w:.-]{{0,80}}(?:{_WORDS})>([^<]{{4,}})</",
    "name and value": rf"(?i)\bname['\"]?\s*[:=]\s*['\"]?[\w.-]{{0,80}}(?:{_WORDS})[\w-]{{0,40}}['\"]?"
    r"\s*,?\s*['\"]?value['\"]?\s*[:=]\s*['\"]?([^\s'\",}]{4,})",
    "block of text that tells": rf"(?im)^([ \t]*)[\w.-]{{0,80}}(?:{_WORDS})['\"]?:[ \t]*[|>][+-]?\d?[ \t]*\n"
    r"((?:\1[ \t]+\S.*\n)*\1[ \t]+\S.*)",
    "list that tells": r"(?im)^[ \t]*(?:- )?[\w.-]{0,80}(?:password|passphrase|api[_-]?key|access[_-]?key|"
    r"auth[_-]?token)s?['\"]?:[ \t]*\n([ \t]*-[ \t]+[^\s:]{4,}(?:[ \t]*\n[ \t]*-[ \t]+[^\s:]{4,})*)[ \t]*$",
    "lines that tell": rf"(?i)\b[\w.-]{{0,80}}(?:{_WORDS})['\"]?\s*[:=]\s*(?:\"{{3}}|'{{3}})\s*"
    r"([^\s'\"]{4,})\s*[\"']{3}",
    "pair that tells": rf"(?i)[(\[]\s*b?(['\"])[\w.-]{{0,80}}(?:{_WORDS})\1,\s*b?"
    r"['\"]((?=[^'\"]*\d)[^'\"]{8,})['\"]\s*[)\]]",
    "password in a sentence": r"(?i)\b(?:with|using|and|is) (?:the )?password[ :]+['\"]?((?=[^\s'\"]*\d)[^\s'\"]{6,})",
    "command line password": r"(?i)(?:^|\s)(?:--?user|-u)[= ]['\"]?[A-Za-z0-9_.@-]+:([^\s'\"]{4,})",
}


def is_telling(name: str) -> bool:
    """Whether a variable, key or flag of that name holds a secret."""
    if name.isupper():
        name = _ONE_OF_SEVERAL.sub("", name)
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).replace("-", "_")
    return bool(_TELLING.search(bare)) and not _NOT_TELLING.search(bare)


def is_plain(value: str, name: str = "") -> bool:
    """Whether a value is none, whatever its name: a switch, a version, a variable; a count, but for a password."""
    if _NUMBER.fullmatch(value):
        return len(value) < 4 or not _A_PASSWORD.search(name.replace("-", "_"))
    return bool(_NOT_SECRET.match(value))


def looks_secret(value: str) -> bool:
    """Words of code and prose are no secrets: a call, an attribute, a path."""
    if len(value) < 4 or value.startswith(("./", "../", "~/")):
        return False
    if value.startswith("/"):  # a path, or base64 that begins so
        return bool(_RANDOM.search(value))
    return not re.fullmatch(r"[A-Za-z_][\w.]*(\[.*|\(.*|\).*|:)", value) and not re.fullmatch(
        r"(?:self|os|args|config|request|settings|deployment|secrets|cls)(\.\w+)+", value
    )
