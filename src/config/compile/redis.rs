//! `[redis]`: the Redis through which gateways share limits.

use std::{path::Path, time::Duration};

use crate::{
    budget::{RedisServer, RedisSettings, RedisTarget, RedisTls},
    config::{
        code::Code,
        compile::upstream,
        diagnostic::{PendingDiagnostic, quote},
        keys, read,
        section::Section,
    },
};

const DEFAULT_URL: &str = "redis://127.0.0.1:6379";

/// Compiles the settings: `None` without a `[redis]` table, `Some(None)` if it has an error.
#[expect(
    clippy::option_option,
    reason = "an invalid table differs from a missing one"
)]
pub(super) fn compile(file: &Section<'_>, base_dir: &Path) -> Option<Option<RedisSettings>> {
    let table = file.get("redis")?;
    let section = Section::of(&table, keys::REDIS.title.to_owned(), &keys::REDIS)?;
    let target = target(&section);
    let target = tls(&section, target, base_dir);
    let key_prefix = match section.get("key_prefix").map(|value| value.text()) {
        Some(text) => text.and_then(|text| text.parse("a prefix of keys", parse_prefix)),
        None => Some("tidegate".to_owned()),
    };
    let timeout = section.duration("timeout");
    let connect_timeout = section.duration("connect_timeout");
    let region_share = section.share("region_share");
    section.finish();
    Some(settings(
        target,
        key_prefix,
        timeout,
        connect_timeout,
        f64::from(region_share.ppm()) / 1e6,
    ))
}

fn settings(
    target: Option<RedisTarget>,
    key_prefix: Option<String>,
    timeout: Duration,
    connect_timeout: Duration,
    region_share: f64,
) -> Option<RedisSettings> {
    Some(RedisSettings {
        target: target?,
        key_prefix: key_prefix?,
        timeout,
        connect_timeout,
        region_share,
    })
}

/// Reads the target: one server, a master that Sentinels name, or a cluster.
fn target(section: &Section<'_>) -> Option<RedisTarget> {
    let written = section.get("url");
    let url = match &written {
        Some(value) => value
            .text()
            .and_then(|text| text.parse("the URL of a Redis", parse_url)),
        None => parse_url(DEFAULT_URL).ok(),
    };
    let cluster = nodes(section, "cluster");
    let sentinel = section
        .get("sentinel")
        .and_then(|value| Section::of(&value, keys::SENTINEL.title.to_owned(), &keys::SENTINEL));
    let sentinel = sentinel.and_then(|sentinel| {
        let nodes = nodes(&sentinel, "nodes");
        let master = sentinel.get("master").map(|value| value.text());
        let hint = "add master = \"mymaster\", the name that the Sentinels have for it";
        let named = nodes.as_ref().is_some_and(Vec::is_empty) || master.is_some();
        if !named {
            sentinel.require("master", hint);
        }
        sentinel.finish();
        Some((master.flatten()?.value, nodes?)).filter(|(_, nodes)| !nodes.is_empty())
    });
    let contradiction = |message: &str| {
        if let Some(value) = section.get("cluster") {
            let problem = PendingDiagnostic::new(Code::Contradiction, message);
            let problem = problem.hint("remove one of them");
            section.document.error(value.name_span(), problem);
        }
    };
    let cluster = cluster?;
    match (sentinel, cluster.is_empty()) {
        (Some(_), false) => {
            contradiction("a cluster does its own failover and has no Sentinels");
            None
        }
        (None, false) => {
            if written.is_some() {
                contradiction("`cluster` and `url` both name servers");
            }
            Some(RedisTarget::Cluster(cluster))
        }
        (Some((master, nodes)), true) => Some(RedisTarget::Sentinel {
            master,
            nodes,
            via: url?,
        }),
        (None, true) => url.map(RedisTarget::One),
    }
}

/// Adds the TLS settings to the target. `None` if something was reported.
fn tls(section: &Section<'_>, target: Option<RedisTarget>, base_dir: &Path) -> Option<RedisTarget> {
    let keys = ["tls_ca", "tls_cert", "tls_key"];
    let is_meant = target.as_ref().is_none_or(RedisTarget::is_secure);
    let read = |key: &'static str| -> Option<Option<Vec<u8>>> {
        let Some(value) = section.get(key) else {
            return Some(None);
        };
        if !is_meant {
            let message = format!(
                "{} has no effect: no connection to Redis uses TLS",
                value.what
            );
            let hint = "write rediss:// instead of redis://, or remove the key";
            value.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
        }
        let path = value.text()?;
        if key != "tls_key" {
            upstream::certificates(&path, base_dir)?;
        }
        let file = base_dir.join(&path.value);
        let bytes = path.document.files.bytes(&file, upstream::MAX_PEM_BYTES);
        let bytes = bytes.map_err(|error| {
            let message = format!("{} cannot be read: {error}", path.shown());
            path.error(PendingDiagnostic::new(Code::BadFile, message).hint(read::HINT));
        });
        Some(Some(bytes.ok()?))
    };
    let [ca, cert, key] = keys.map(read);
    let (ca, cert, key) = (ca?, cert?, key?);
    for (one, is_there, other) in [
        ("tls_cert", key.is_some(), "tls_key"),
        ("tls_key", cert.is_some(), "tls_cert"),
    ] {
        if let Some(value) = section.get(one).filter(|_| !is_there) {
            let message = format!("{} has no effect without `{other}`", value.what);
            let problem = PendingDiagnostic::new(Code::MissingKey, message);
            value.error(problem.hint("name both files, or remove the key"));
            return None;
        }
    }
    let identity = cert.zip(key);
    if ca.is_none() && identity.is_none() {
        return target;
    }
    target?
        .with_tls(&RedisTls { ca, identity })
        .map_err(|error| {
            let value = section.get("tls_key").or_else(|| section.get("tls_ca"));
            if let Some(value) = value {
                let message = format!("{} cannot be used: {error}", value.what);
                let hint = "use PEM files: a certificate and its private key";
                value.error(PendingDiagnostic::new(Code::BadFile, message).hint(hint));
            }
        })
        .ok()
}

/// Reads a list of servers, each a URL or `HOST:PORT`; empty if the key is missing.
fn nodes(section: &Section<'_>, key: &'static str) -> Option<Vec<RedisServer>> {
    let texts = section.texts(key).unwrap_or_default();
    let nodes = texts.iter().map(|text| {
        text.parse("the address of a Redis", |text| {
            if text.contains("://") {
                return parse_url(text);
            }
            parse_url(&format!("redis://{text}"))
        })
    });
    nodes.collect()
}

fn parse_url(text: &str) -> Result<RedisServer, PendingDiagnostic> {
    RedisServer::parse(text).map_err(|_| {
        let problem = PendingDiagnostic::new(Code::BadAddress, "this is not a Redis URL");
        problem.hint(
            "write \"redis://HOST:PORT\", \"rediss://USER:PASSWORD@HOST:PORT/DATABASE\" for TLS, or \"unix:///path/redis.sock\"",
        )
    })
}

fn parse_prefix(text: &str) -> Result<String, PendingDiagnostic> {
    const MAX_BYTES: usize = 64;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | ':' | '/');
    if (1..=MAX_BYTES).contains(&text.len()) && text.chars().all(allowed) {
        return Ok(text.to_owned());
    }
    let message = format!("{} is not a valid prefix for keys in Redis", quote(text));
    let hint = format!("use 1 to {MAX_BYTES} characters of A-Z a-z 0-9 _ . - : /");
    Err(PendingDiagnostic::new(Code::BadName, message).hint(hint))
}
