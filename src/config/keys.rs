//! The only list of every table and key, and of which are built. The reader accepts the built ones
//! and rejects the rest with the reason given here. Tests check docs/config.md against it.

/// Whether a key is built.
#[derive(Clone, Copy, Debug)]
pub(super) enum Status {
    /// It does what the documentation says.
    Built,
    /// Rejected; the text names the missing feature.
    NotBuilt(&'static str),
}

use Status::{Built, NotBuilt};

/// The keys of one table.
#[derive(Debug)]
pub(super) struct Keys {
    /// The header as a file writes it.
    pub(super) title: &'static str,
    /// The keys, in the order of the documentation.
    pub(super) keys: &'static [(&'static str, Status)],
}

impl Keys {
    pub(super) fn status(&self, key: &str) -> Option<Status> {
        self.keys
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, status)| *status)
    }

    pub(super) fn built(&self) -> impl Iterator<Item = &'static str> {
        let built = self
            .keys
            .iter()
            .filter(|(_, status)| matches!(status, Built));
        built.map(|(name, _)| *name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().map(|(name, _)| *name)
    }
}

/// The tables of a configuration file.
pub(super) static FILE: Keys = Keys {
    title: "the file",
    keys: &[
        ("server", Built),
        ("listen", Built),
        ("client_ip", Built),
        ("user", Built),
        ("upstream", Built),
        ("limit", Built),
        ("gateway", Built),
        ("route", Built),
        ("override", Built),
        ("response", Built),
        ("overload", Built),
        ("redis", Built),
        ("admin", Built),
        ("log", Built),
        ("trace", Built),
    ],
};

/// `[server]`.
pub(super) static SERVER: Keys = Keys {
    title: "[server]",
    keys: &[
        ("workers", Built),
        ("drain_delay", Built),
        ("drain_timeout", Built),
        ("watch_config", Built),
        ("max_connections", Built),
        ("max_connections_per_ip", Built),
        ("max_keys", Built),
        ("max_body_buffer", Built),
    ],
};

/// `[[listen]]`.
pub(super) static LISTEN: Keys = Keys {
    title: "[[listen]]",
    keys: &[
        ("address", Built),
        ("http2", Built),
        ("proxy_protocol", Built),
        ("header_timeout", Built),
        ("body_timeout", Built),
        ("min_body_rate", Built),
        ("idle_timeout", Built),
        ("max_header_size", Built),
        ("max_header_count", Built),
        ("max_uri_size", Built),
        ("max_body_size", Built),
        ("max_streams", Built),
        ("tls", Built),
    ],
};

/// `[listen.tls]`.
pub(super) static LISTEN_TLS: Keys = Keys {
    title: "[listen.tls]",
    keys: &[
        ("certificates", Built),
        ("min_version", Built),
        ("client_ca", Built),
        ("client_auth", Built),
        ("max_handshakes", Built),
    ],
};

/// One of the `certificates` of `[listen.tls]`.
pub(super) static CERTIFICATE: Keys = Keys {
    title: "[[listen.tls.certificates]]",
    keys: &[("cert", Built), ("key", Built)],
};

/// `[client_ip]`.
pub(super) static CLIENT_IP: Keys = Keys {
    title: "[client_ip]",
    keys: &[
        ("trusted_proxies", Built),
        ("trusted_hops", Built),
        ("header", Built),
        ("ipv4_prefix", Built),
        ("ipv6_prefix", Built),
    ],
};

/// `[[user]]` with `from = "api_key"`.
pub(super) static USER_API_KEY: Keys = Keys {
    title: "[[user]] from = \"api_key\"",
    keys: &[
        ("from", Built),
        ("header", Built),
        ("keys_file", Built),
        ("invalid", Built),
    ],
};

/// `[[user]]` with `from = "jwt"`.
pub(super) static USER_JWT: Keys = Keys {
    title: "[[user]] from = \"jwt\"",
    keys: &[
        ("from", Built),
        ("header", Built),
        ("jwks_file", Built),
        ("jwks_url", Built),
        ("refresh", Built),
        ("secret_file", Built),
        ("public_key_file", Built),
        ("algorithms", Built),
        ("issuer", Built),
        ("audience", Built),
        ("leeway", Built),
        ("user_claim", Built),
        ("tier_claim", Built),
        ("tenant_claim", Built),
        ("invalid", Built),
    ],
};

/// `[[user]]` with `from = "header"`.
pub(super) static USER_HEADER: Keys = Keys {
    title: "[[user]] from = \"header\"",
    keys: &[("from", Built), ("header", Built), ("tier_header", Built)],
};

/// `[[user]]` with `from = "client_cert"`.
pub(super) static USER_CLIENT_CERT: Keys = Keys {
    title: "[[user]] from = \"client_cert\"",
    keys: &[("from", Built), ("field", Built)],
};

/// The keys file of `[[user]] from = "api_key"`.
pub(super) static KEYS_FILE: Keys = Keys {
    title: "the keys file",
    keys: &[("keys", Built)],
};

/// One entry of a keys file.
pub(super) static API_KEY: Keys = Keys {
    title: "[keys.NAME]",
    keys: &[
        ("sha256", Built),
        ("user", Built),
        ("tier", Built),
        ("tenant", Built),
    ],
};

/// `[upstream.NAME]`.
pub(super) static UPSTREAM: Keys = Keys {
    title: "[upstream.NAME]",
    keys: &[
        ("servers", Built),
        ("balance", Built),
        ("connect_timeout", Built),
        ("response_timeout", Built),
        ("body_timeout", Built),
        ("abandoned_timeout", Built),
        ("idle_timeout", Built),
        ("max_connections", Built),
        ("retries", Built),
        ("host", Built),
        ("tls_ca", Built),
        ("tls_server_name", Built),
        ("health", Built),
        ("outlier", Built),
        ("breaker", Built),
    ],
};

/// `[upstream.NAME.health]`.
pub(super) static HEALTH: Keys = Keys {
    title: "[upstream.NAME.health]",
    keys: &[
        ("path", Built),
        ("interval", Built),
        ("timeout", Built),
        ("unhealthy_after", Built),
        ("healthy_after", Built),
    ],
};

/// `[upstream.NAME.outlier]`.
pub(super) static OUTLIER: Keys = Keys {
    title: "[upstream.NAME.outlier]",
    keys: &[("failures", Built), ("eject_for", Built)],
};

/// `[upstream.NAME.breaker]`.
pub(super) static BREAKER: Keys = Keys {
    title: "[upstream.NAME.breaker]",
    keys: &[("failures", Built), ("open_for", Built)],
};

/// `[limit.NAME]`.
pub(super) static LIMIT: Keys = Keys {
    title: "[limit.NAME]",
    keys: &[
        ("key", Built),
        ("algorithm", Built),
        ("rate", Built),
        ("burst", Built),
        ("limit", Built),
        ("scope", Built),
        ("sync", Built),
        ("slack", Built),
        ("on_redis_down", Built),
        ("local_fraction", Built),
        ("exempt", Built),
        ("warn_at", Built),
        ("slow_at", Built),
        ("slow_by", Built),
        ("over", Built),
        ("max_delay", Built),
        ("mode", Built),
        ("enforce_percent", Built),
        ("missing", Built),
        ("charge_rejected", Built),
        ("count_status", Built),
        ("retry_jitter", Built),
        ("disclose", Built),
        ("cost", NotBuilt("costs read from a request or a response")),
    ],
};

/// `exempt` of a limit.
pub(super) static EXEMPT: Keys = Keys {
    title: "[limit.NAME.exempt]",
    keys: &[("ips", Built), ("users", Built), ("tiers", Built)],
};

/// `[[override]]`.
pub(super) static OVERRIDE: Keys = Keys {
    title: "[[override]]",
    keys: &[
        ("limit", Built),
        ("user", Built),
        ("tenant", Built),
        ("ip", Built),
        ("key", Built),
        ("rate", Built),
        ("burst", Built),
        ("exempt", Built),
        ("block", Built),
        ("until", Built),
        ("note", Built),
    ],
};

/// `[gateway]`.
pub(super) static GATEWAY: Keys = Keys {
    title: "[gateway]",
    keys: &[("limits", Built)],
};

/// `[[route]]`.
pub(super) static ROUTE: Keys = Keys {
    title: "[[route]]",
    keys: &[
        ("name", Built),
        ("hosts", Built),
        ("path", Built),
        ("methods", Built),
        ("upstream", Built),
        ("limits", Built),
        ("skip_limits", Built),
        ("cost", Built),
        ("max_body_size", Built),
        ("priority", Built),
    ],
};

/// `[overload]`.
pub(super) static OVERLOAD: Keys = Keys {
    title: "[overload]",
    keys: &[
        ("max_in_flight", Built),
        ("reserve", Built),
        ("floor", Built),
    ],
};

/// `[overload.reserve]`.
pub(super) static RESERVE: Keys = Keys {
    title: "[overload.reserve]",
    keys: &[("critical", Built), ("normal", Built)],
};

/// `[response]`.
pub(super) static RESPONSE: Keys = Keys {
    title: "[response]",
    keys: &[
        ("fields", Built),
        ("on", Built),
        ("body", Built),
        ("status_path", Built),
    ],
};

/// `[redis]`.
pub(super) static REDIS: Keys = Keys {
    title: "[redis]",
    keys: &[
        ("url", Built),
        ("cluster", Built),
        ("sentinel", Built),
        ("tls_ca", Built),
        ("tls_cert", Built),
        ("tls_key", Built),
        ("key_prefix", Built),
        ("timeout", Built),
        ("connect_timeout", Built),
        ("region_share", Built),
    ],
};

/// `sentinel` of `[redis]`.
pub(super) static SENTINEL: Keys = Keys {
    title: "[redis.sentinel]",
    keys: &[("master", Built), ("nodes", Built)],
};

/// `[admin]`.
pub(super) static ADMIN: Keys = Keys {
    title: "[admin]",
    keys: &[
        ("address", Built),
        ("token_file", Built),
        ("check_identity_from", Built),
    ],
};

/// `[log]`.
pub(super) static LOG: Keys = Keys {
    title: "[log]",
    keys: &[
        ("level", Built),
        ("format", Built),
        ("access", Built),
        ("sample", Built),
        ("max_rejected", Built),
    ],
};

/// `[trace]`.
pub(super) static TRACE: Keys = Keys {
    title: "[trace]",
    keys: &[("otlp_endpoint", Built), ("sample", Built)],
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every table but the list of tables itself.
    const TABLES: &[&Keys] = &[
        &SERVER,
        &LISTEN,
        &LISTEN_TLS,
        &CERTIFICATE,
        &CLIENT_IP,
        &USER_API_KEY,
        &USER_JWT,
        &USER_HEADER,
        &USER_CLIENT_CERT,
        &API_KEY,
        &UPSTREAM,
        &HEALTH,
        &OUTLIER,
        &BREAKER,
        &LIMIT,
        &EXEMPT,
        &GATEWAY,
        &ROUTE,
        &OVERRIDE,
        &RESPONSE,
        &REDIS,
        &SENTINEL,
        &ADMIN,
        &LOG,
        &TRACE,
    ];

    const DOCUMENT: &str = include_str!("../../docs/config.md");

    /// The first column of the rows below a heading.
    fn rows(heading: &str) -> BTreeSet<&'static str> {
        let section = DOCUMENT
            .split("\n## ")
            .find_map(|section| section.strip_prefix(heading));
        let section = section.unwrap_or_else(|| panic!("docs/config.md has no section {heading}"));
        assert!(section.starts_with('\n'), "{heading} is a separate heading");
        section
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
            .map(|(name, _)| name)
            .collect()
    }

    #[test]
    fn the_documentation_names_every_key_that_is_built_and_no_other() {
        for table in TABLES {
            let built: BTreeSet<&str> = table.built().collect();
            assert_eq!(
                rows(&format!("`{}`", table.title)),
                built,
                "{}",
                table.title
            );
        }
    }

    #[test]
    fn the_documentation_names_every_key_that_is_not_built() {
        let mut unbuilt = BTreeSet::new();
        for table in TABLES {
            let keys = table
                .keys
                .iter()
                .filter(|(_, status)| !matches!(status, Built));
            unbuilt.extend(keys.map(|(key, _)| format!("{} {key}", table.title)));
        }
        let tables = FILE
            .keys
            .iter()
            .filter(|(_, status)| !matches!(status, Built));
        unbuilt.extend(tables.map(|(table, _)| format!("[{table}]")));
        let documented: BTreeSet<String> = rows("Not built yet")
            .into_iter()
            .map(str::to_owned)
            .collect();
        assert_eq!(documented, unbuilt);
    }
}
