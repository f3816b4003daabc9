//! `[upstream.NAME]`: the servers behind the gateway.

use std::{net::Ipv6Addr, ops::Range, path::Path};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

use super::{listen::unix_path, names::check_name, process::to_usize};
use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys, read,
        section::Section,
        value::ConfigValue,
    },
    upstream::{
        Balance, BreakerConfig, Health, HostHeader, Scheme, ServerAddress, UpstreamSettings,
        UpstreamTls,
    },
};

/// A minimal upstream to paste into a file without one.
const EXAMPLE: &str = "add: [upstream.origin] and below it servers = [\"http://127.0.0.1:9000\"]";

/// A named upstream; `settings` is `None` if it has an error.
pub(super) struct NamedUpstream {
    pub(super) name: String,
    pub(super) span: Range<usize>,
    pub(super) settings: Option<UpstreamSettings>,
}

pub(super) fn compile(file: &Section<'_>, base_dir: &Path) -> Vec<NamedUpstream> {
    let tables = file.named("upstream", &keys::UPSTREAM);
    if tables.is_empty() && !file.is_in_doubt("upstream") {
        let message = "there is no upstream: requests have nowhere to go";
        file.error(PendingDiagnostic::new(Code::MissingKey, message).hint(EXAMPLE));
    }
    let upstream = |(name, table): (ExpandedText<'_>, ConfigValue<'_>)| {
        check_name(&name, "an upstream");
        let section = Section::of(&table, table.what.to_string(), &keys::UPSTREAM);
        let settings = section.and_then(|section| settings(section, &name.value, base_dir));
        NamedUpstream {
            name: name.value,
            span: name.span,
            settings,
        }
    };
    tables.into_iter().map(upstream).collect()
}

fn settings(section: Section<'_>, name: &str, base_dir: &Path) -> Option<UpstreamSettings> {
    let servers = servers(&section);
    let tls = tls(&section, servers.as_deref(), base_dir);
    let health = section.get("health").map(|value| health(&value, name));
    let response_timeout = section.duration("response_timeout");
    let max_connections = section.integer("max_connections");
    let settings = UpstreamSettings {
        name: name.to_owned(),
        servers: Vec::new(),
        connect_timeout: section.duration("connect_timeout"),
        response_timeout,
        body_timeout: section.duration("body_timeout"),
        // a server gets the same time to answer after its client has left
        abandoned_timeout: section.duration_or("abandoned_timeout", response_timeout),
        idle_timeout: section.duration("idle_timeout"),
        balance: section.choice("balance", BALANCES).unwrap_or_default(),
        max_connections: to_usize(max_connections),
        retries: to_usize(section.integer("retries")),
        tls: UpstreamTls::default(),
        health: None,
        outlier: outlier(&section),
        breaker: breaker(&section),
        host: section
            .get("host")
            .and_then(|value| host_header(&value.text()?))
            .unwrap_or_default(),
    };
    section.finish();
    Some(UpstreamSettings {
        servers: servers?,
        tls: tls?,
        health: health.map_or(Some(None), |health| health.map(Some))?,
        ..settings
    })
}

const BALANCES: &[(&str, Balance)] = &[
    ("least_requests", Balance::LeastRequests),
    ("round_robin", Balance::RoundRobin),
    ("hash:ip", Balance::HashIp),
    ("hash:user", Balance::HashUser),
];

/// `None` if something was reported.
fn tls(
    section: &Section<'_>,
    servers: Option<&[ServerAddress]>,
    base_dir: &Path,
) -> Option<UpstreamTls> {
    let is_secure = |server: &ServerAddress| {
        matches!(
            server,
            ServerAddress::Http {
                scheme: Scheme::Https,
                ..
            }
        )
    };
    let is_meant = servers.is_none_or(|servers| servers.iter().any(is_secure));
    let text = |key: &'static str| {
        let value = section.get(key)?;
        if !is_meant {
            let message = format!(
                "{} has no effect: no server of the upstream uses TLS",
                value.what
            );
            let hint = "write https:// for the servers that use TLS, or remove the key";
            value.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
        }
        Some(value.text())
    };
    let ca = text("tls_ca").map(|path| path.and_then(|path| certificates(&path, base_dir)));
    let server_name = text("tls_server_name").map(|name| server_name(&name?));
    Some(UpstreamTls {
        ca: ca.map_or(Some(None), |ca| ca.map(Some))?,
        server_name: server_name.map_or(Some(None), |name| name.map(Some))?,
    })
}

/// Several times the size of the CA bundle that browsers use.
pub(super) const MAX_PEM_BYTES: u64 = 4 << 20;

/// Loads the certificates of a file; each must be usable as a trust anchor.
pub(super) fn certificates(
    path: &ExpandedText<'_>,
    base_dir: &Path,
) -> Option<Vec<CertificateDer<'static>>> {
    let unfit = |problem: String, hint: &str| {
        let message = format!("{} {problem}", path.shown());
        path.error(PendingDiagnostic::new(Code::BadFile, message).hint(hint));
    };
    let file = base_dir.join(&path.value);
    let bytes = path
        .document
        .files
        .bytes(&file, MAX_PEM_BYTES)
        .map_err(|error| unfit(format!("cannot be read: {error}"), read::HINT))
        .ok()?;
    const PEM: &str = "name a PEM file with certificates, each between BEGIN and END CERTIFICATE";
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found
        .map_err(|error| unfit(format!("is not PEM: {error}"), PEM))
        .ok()?;
    if found.is_empty() {
        unfit("contains no certificate".to_owned(), PEM);
        return None;
    }
    let mut roots = RootCertStore::empty();
    for (at, certificate) in found.iter().enumerate() {
        if let Err(error) = roots.add(certificate.clone()) {
            let problem = format!(
                "contains a certificate that cannot be used (number {}): {error}",
                at + 1
            );
            unfit(
                problem,
                "name the certificate of the CA that signed the servers' certificates",
            );
            return None;
        }
    }
    Some(found)
}

fn server_name(text: &ExpandedText<'_>) -> Option<ServerName<'static>> {
    text.parse("a server name", |value| {
        ServerName::try_from(value.to_owned()).map_err(|_| {
            let message = format!("{} is not a name that a certificate can have", quote(value));
            PendingDiagnostic::new(Code::BadAddress, message)
                .hint("write a DNS name or an IP address, such as \"origin.internal\"")
        })
    })
}

/// `None` if something was reported.
fn health(value: &ConfigValue<'_>, name: &str) -> Option<Health> {
    let section = Section::of(value, format!("[upstream.{name}.health]"), &keys::HEALTH)?;
    let path = section.require(
        "path",
        "add path = \"/healthz\", a path that a healthy server answers with 200",
    );
    let path = path.and_then(|value| health_path(&value.text()?));
    let times = |key| u32::try_from(section.integer(key)).unwrap_or(1);
    let health = Health {
        path: String::new(),
        interval: section.duration("interval"),
        timeout: section.duration("timeout"),
        unhealthy_after: times("unhealthy_after"),
        healthy_after: times("healthy_after"),
    };
    section.finish();
    Some(Health {
        path: path?,
        ..health
    })
}

/// Reads a path, with an optional query, as it is sent.
fn health_path(text: &ExpandedText<'_>) -> Option<String> {
    text.parse("a path", |value| {
        let is_sendable = |byte: u8| byte.is_ascii_graphic() && byte != b'#';
        if value.starts_with('/') && value.bytes().all(is_sendable) {
            return Ok(value.to_owned());
        }
        let message = format!("{} is not a path that can be requested", quote(value));
        Err(PendingDiagnostic::new(Code::BadField, message)
            .hint("start it with a slash, and percent-encode everything but visible ASCII"))
    })
}

/// Outlier ejection; on by default.
fn outlier(section: &Section<'_>) -> BreakerConfig {
    let table = section.table("outlier", &keys::OUTLIER);
    let rating = rating(&table, "eject_for");
    table.finish();
    rating
}

/// The circuit breaker; off without its table.
fn breaker(section: &Section<'_>) -> BreakerConfig {
    let table = section.table("breaker", &keys::BREAKER);
    let mut rating = rating(&table, "open_for");
    if !table.is_there() {
        rating.failures = 0;
    }
    table.finish();
    rating
}

fn rating(table: &Section<'_>, pause_key: &'static str) -> BreakerConfig {
    let failures = table.integer("failures");
    BreakerConfig {
        failures: u32::try_from(failures).unwrap_or(u32::MAX),
        pause: table.duration(pause_key),
    }
}

fn servers(section: &Section<'_>) -> Option<Vec<ServerAddress>> {
    let value = section.require("servers", "add servers = [\"http://127.0.0.1:9000\"]")?;
    let written = value.array()?;
    if written.is_empty() {
        let message = format!("{} is empty", value.what);
        value.error(
            PendingDiagnostic::new(Code::OutOfRange, message).hint("name at least one server"),
        );
    }
    // read every server, to report all problems at once
    let mut read: Vec<Option<ServerAddress>> = Vec::new();
    for item in &written {
        let text = item.text();
        let server = text.as_ref().and_then(server);
        if let (Some(text), true) = (&text, server.is_some() && read.contains(&server)) {
            let message = format!("{} is the same server as an earlier one", text.shown());
            let hint = "list each server once; all servers have the same weight";
            text.error(PendingDiagnostic::new(Code::Duplicate, message).hint(hint));
        }
        read.push(server);
    }
    read.into_iter().collect()
}

fn server(text: &ExpandedText<'_>) -> Option<ServerAddress> {
    text.parse("a server", parse_server)
}

pub(in crate::config) fn parse_server(text: &str) -> Result<ServerAddress, PendingDiagnostic> {
    const HINT: &str = "write \"http://HOST:PORT\", \"https://HOST:PORT\", \"h2c://HOST:PORT\", \"unix:/path\" or \"builtin:echo\"";
    let bad = |message: String| PendingDiagnostic::new(Code::BadAddress, message).hint(HINT);
    if text == "builtin:echo" {
        return Ok(ServerAddress::Echo);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return unix_path(path).map(ServerAddress::Unix);
    }
    let scheme = [Scheme::Http, Scheme::Https, Scheme::H2c]
        .into_iter()
        .find_map(|scheme| {
            let rest = text.strip_prefix(scheme.as_str())?;
            Some((scheme, rest.strip_prefix("://")?))
        });
    let Some((scheme, authority)) = scheme else {
        let problem = bad(format!("{} is not a server", quote(text)));
        let meant = format!("http://{text}");
        return Err(match parse_server(&meant) {
            Ok(_) => problem.hint(format!("did you mean \"{meant}\"?")),
            Err(_) => problem,
        });
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    if authority.contains(['/', '?', '#']) {
        let message = format!(
            "{} has a path: a server is only a host and a port",
            quote(text)
        );
        return Err(bad(message));
    }
    if authority.contains('@') {
        return Err(bad(
            "a server's address cannot contain a user name or password".to_owned(),
        ));
    }
    let (host, port) = split_port(authority, scheme.default_port())
        .ok_or_else(|| bad(format!("{} has no valid port", quote(text))))?;
    let literal = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = match literal {
        Some(address) if address.parse::<Ipv6Addr>().is_ok() => address,
        None if is_host_name(host) => host,
        _ => return Err(bad(format!("{} has no valid host", quote(text)))),
    };
    Ok(ServerAddress::Http {
        scheme,
        host: host.to_ascii_lowercase(),
        port,
    })
}

/// Splits `host:port`, `host`, `[::1]:port` or `[::1]`.
fn split_port(authority: &str, default: u16) -> Option<(&str, u16)> {
    let after_bracket = authority.rfind(']').map_or(0, |at| at + 1);
    let Some(colon) = authority[after_bracket..].find(':') else {
        return Some((authority, default));
    };
    let (host, port) = authority.split_at(after_bracket + colon);
    let digits = &port[1..];
    let port = digits
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| digits.parse().ok())??;
    (port != 0).then_some((host, port))
}

/// Whether it is a DNS name or an IPv4 address (RFC 1123 §2.1). Container networks also use
/// underscores.
fn is_host_name(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    host.len() <= 253 && host.strip_suffix('.').unwrap_or(host).split('.').all(label)
}

fn host_header(text: &ExpandedText<'_>) -> Option<HostHeader> {
    text.parse("a host", |value| match value {
        "preserve" => Ok(HostHeader::Preserve),
        "server" => Ok(HostHeader::Server),
        literal => {
            let authority: Option<http::uri::Authority> =
                literal.parse().ok().filter(|_| !literal.contains('@'));
            let value = authority.and_then(|_| http::HeaderValue::from_str(literal).ok());
            value.map(HostHeader::Literal).ok_or_else(|| {
                PendingDiagnostic::new(Code::BadField, format!("{} is not a host", quote(literal)))
                    .hint(
                        "write \"preserve\", \"server\" or a host, for example \"origin.internal\"",
                    )
            })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_host_and_a_port_a_socket_or_the_echo() {
        let http = |host: &str, port| {
            Ok(ServerAddress::Http {
                scheme: Scheme::Http,
                host: host.to_owned(),
                port,
            })
        };
        let secure = ServerAddress::Http {
            scheme: Scheme::Https,
            host: "origin".to_owned(),
            port: 443,
        };
        assert_eq!(parse_server("https://origin/"), Ok(secure));
        assert_eq!(parse_server("http://Origin:9000"), http("origin", 9000));
        assert_eq!(parse_server("http://10.0.0.1/"), http("10.0.0.1", 80));
        assert_eq!(parse_server("http://[::1]:81"), http("::1", 81));
        assert_eq!(parse_server("http://[::1]"), http("::1", 80));
        assert_eq!(
            parse_server("unix:/run/a.sock"),
            Ok(ServerAddress::Unix("/run/a.sock".into()))
        );
        assert_eq!(parse_server("builtin:echo"), Ok(ServerAddress::Echo));
    }

    #[test]
    fn what_is_not_quite_a_server_is_refused() {
        for bad in [
            "",
            "localhost:3000",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:65536",
            "http://a:+80",
            "http://a:",
            "http://a/b",
            "http://a?b",
            "http://u:p@a",
            "http://::1",
            "http://[::1",
            "http://[a]",
            "http://a b",
            "http://-a",
            "http://a..b",
            "unix:relative",
            "builtin:nothing",
            "http://é",
        ] {
            assert_eq!(
                parse_server(bad).expect_err(bad).code,
                Code::BadAddress,
                "{bad}"
            );
        }
        let with_password = parse_server("http://user:hunter2@a").expect_err("refused");
        assert!(!format!("{with_password:?}").contains("hunter2"));
    }
}
