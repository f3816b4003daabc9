//! `[client_ip]`, `[[user]]` and the keys file.

use super::record::{
    DAY,
    DefaultValue::{Note, Required, Value},
    KeyRecord, Keys, TEXT,
    ValueKind::{Choice, Duration, Integer, List, Named, OneOf, Text},
};
use crate::identity::address::ELEMENTS_MAX;

/// `[client_ip]`.
pub(in crate::config) static CLIENT_IP: Keys = Keys {
    title: "[client_ip]",
    keys: &[
        KeyRecord::new(
            "trusted_proxies",
            List("list of networks", &TEXT),
            Value("[]"),
            "peers whose forwarding header tidegate trusts: `\"10.0.0.0/8\"`, `\"::1\"`",
        ),
        KeyRecord::new(
            "trusted_hops",
            Integer(1, ELEMENTS_MAX as u64),
            Note("none"),
            "for proxies without stable addresses. N proxies append to the list, so the client \
             is its Nth element from the right, or the peer if there are fewer. **Risk:** \
             without `trusted_proxies` every peer counts as a proxy. Use it only if clients \
             cannot reach the gateway directly",
        ),
        KeyRecord::new(
            "header",
            Text("text"),
            Value("\"x-forwarded-for\""),
            "the header with the client's address: this list or `\"forwarded\"` (RFC 7239), \
             read from the right; the name of a header with one address; or `\"none\"`",
        ),
        KeyRecord::new(
            "ipv4_prefix",
            Integer(1, 32),
            Value("32"),
            "limits count an address by this prefix",
        ),
        KeyRecord::new(
            "ipv6_prefix",
            Integer(1, 128),
            Value("64"),
            "limits count an address by this prefix",
        ),
    ],
};

/// `[[user]] from = "api_key"`.
pub(in crate::config) static USER_API_KEY: Keys = Keys {
    title: "[[user]] from = \"api_key\"",
    keys: &[
        KeyRecord::new("from", Choice(&["api_key"]), Required, "a key in a header"),
        KeyRecord::new(
            "header",
            Text("field name"),
            Value("\"x-api-key\""),
            "the header",
        ),
        KeyRecord::new(
            "keys_file",
            Text("path"),
            Required,
            "the known keys, see below",
        ),
        KeyRecord::new(
            "invalid",
            Choice(&["reject", "anonymous"]),
            Value("\"reject\""),
            "answer 401 to an unknown key, or treat it as no key",
        ),
    ],
};

/// `[keys.NAME]`.
pub(in crate::config) static API_KEY: Keys = Keys {
    title: "[keys.NAME]",
    keys: &[
        KeyRecord::new(
            "sha256",
            Text("64 hexadecimal digits"),
            Required,
            "the digest of the key. `tidegate hash-key NAME` asks for the key and prints the \
             table",
        ),
        KeyRecord::new(
            "user",
            Text("text"),
            Note("the table's NAME"),
            "the user of the key",
        ),
        KeyRecord::new(
            "tier",
            Text("name"),
            Note("none"),
            "selects among the quotas of a limit",
        ),
        KeyRecord::new(
            "tenant",
            Text("text"),
            Note("none"),
            "for limits that count by tenant",
        ),
    ],
};

/// `[[user]] from = "jwt"`.
pub(in crate::config) static USER_JWT: Keys = Keys {
    title: "[[user]] from = \"jwt\"",
    keys: &[
        KeyRecord::new("from", Choice(&["jwt"]), Required, "a token in a header"),
        KeyRecord::new(
            "header",
            Text("field name"),
            Value("\"authorization\""),
            "the header. In `Authorization` the token follows `Bearer`; in other headers it is \
             alone",
        ),
        KeyRecord::new(
            "jwks_url",
            Text("URL"),
            Note("one of four"),
            "a JSON Web Key Set that the issuer publishes: \
             `\"https://issuer.example.com/.well-known/jwks.json\"`, verified with the system's \
             roots",
        ),
        KeyRecord::new(
            "refresh",
            Duration(10_000, DAY),
            Value("\"10min\""),
            "how often tidegate fetches it",
        ),
        KeyRecord::new(
            "jwks_file",
            Text("path"),
            Note("one of four"),
            "a key set in a file",
        ),
        KeyRecord::new(
            "public_key_file",
            Text("path"),
            Note("one of four"),
            "one public key in PEM: `PUBLIC KEY` or `RSA PUBLIC KEY`",
        ),
        KeyRecord::new(
            "secret_file",
            Text("path"),
            Note("one of four"),
            "a secret for HMAC, at least 32 bytes for HS256 (48, 64). A line end after it is \
             ignored",
        ),
        KeyRecord::new(
            "algorithms",
            List(
                "list",
                &Choice(&[
                    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384",
                    "EdDSA", "Ed25519", "HS256", "HS384", "HS512",
                ]),
            ),
            Note("`[\"RS256\", \"ES256\", \"EdDSA\"]`, of a secret `[\"HS256\"]`"),
            "the accepted algorithms: `RS256` `RS384` `RS512` `PS256` `PS384` `PS512` `ES256` \
             `ES384` `EdDSA` (or `Ed25519`), and in files `HS256` `HS384` `HS512`",
        ),
        KeyRecord::new(
            "issuer",
            Text("text"),
            Note("any"),
            "the required value of `iss`",
        ),
        KeyRecord::new(
            "audience",
            OneOf(&[Text("text"), List("a list of them", &Text("text"))]),
            Note("any"),
            "a value that `aud` must be or contain",
        ),
        KeyRecord::new(
            "leeway",
            Duration(0, 60_000),
            Value("\"30s\""),
            "the tolerated difference between the issuer's clock and ours",
        ),
        KeyRecord::new(
            "user_claim",
            Text("name"),
            Value("\"sub\""),
            "the claim with the user",
        ),
        KeyRecord::new(
            "tier_claim",
            Text("name"),
            Note("none"),
            "the claim with the tier",
        ),
        KeyRecord::new(
            "tenant_claim",
            Text("name"),
            Note("none"),
            "the claim with the tenant",
        ),
        KeyRecord::new(
            "invalid",
            Choice(&["reject", "anonymous"]),
            Value("\"reject\""),
            "answer 401 to an invalid token, or treat it as no token",
        ),
    ],
};

/// `[[user]] from = "header"`.
pub(in crate::config) static USER_HEADER: Keys = Keys {
    title: "[[user]] from = \"header\"",
    keys: &[
        KeyRecord::new(
            "from",
            Choice(&["header"]),
            Required,
            "a header with the user",
        ),
        KeyRecord::new(
            "header",
            Text("field name"),
            Value("\"x-user-id\""),
            "the header",
        ),
        KeyRecord::new(
            "tier_header",
            Text("field name"),
            Note("none"),
            "a header with the tier",
        ),
    ],
};

/// `[[user]] from = "client_cert"`.
pub(in crate::config) static USER_CLIENT_CERT: Keys = Keys {
    title: "[[user]] from = \"client_cert\"",
    keys: &[
        KeyRecord::new(
            "from",
            Choice(&["client_cert"]),
            Required,
            "a field of the client's certificate",
        ),
        KeyRecord::new(
            "field",
            Choice(&["common_name", "san_dns", "san_uri", "fingerprint"]),
            Value("\"common_name\""),
            "the field. The fingerprint is the SHA-256 of the certificate in lower-case \
             hexadecimal",
        ),
    ],
};

/// The keys file of `[[user]] from = "api_key"`.
pub(in crate::config) static KEYS_FILE: Keys = Keys {
    title: "the keys file",
    keys: &[KeyRecord::new(
        "keys",
        Named(&API_KEY),
        Note("none"),
        "The known API keys.",
    )],
};
