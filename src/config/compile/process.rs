//! `[server]`, `[admin]`, `[log]` and `[trace]`: the process itself.

use std::{
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    path::Path,
};

use super::network::networks;
use crate::{
    config::{
        AdminSettings, ProcessSettings,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys, read,
        section::Section,
    },
    identity::{self, TrustedProxies, UserSource},
    listener::{self, BindAddress},
    telemetry::{
        AccessLines, LogFormat, LogLevel, LogSettings,
        trace::{Collector, TraceSettings},
    },
};

const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9901);

pub(super) fn server(file: &Section<'_>) -> ProcessSettings {
    let section = file.table("server", &keys::SERVER);
    let max_connections = section.integer("max_connections");
    // one client cannot take every connection; a small gateway may have a single client
    let share = (max_connections / 4).max(1000).min(max_connections);
    let per_ip = section.integer_or("max_connections_per_ip", share);
    let server = ProcessSettings {
        workers: workers(&section),
        drain_delay: section.duration("drain_delay"),
        drain_timeout: section.duration("drain_timeout"),
        max_connections: to_usize(max_connections),
        max_connections_per_ip: to_usize(per_ip),
        max_keys: to_usize(section.integer("max_keys")),
        max_body_buffer: to_usize(section.size("max_body_buffer")),
        watch_config: section.boolean("watch_config"),
    };
    section.finish();
    server
}

fn workers(section: &Section<'_>) -> Option<NonZeroUsize> {
    let value = section.get("workers")?;
    if value.is_string() {
        let text = value.text()?;
        if text.value != "auto" {
            let problem = PendingDiagnostic::new(
                Code::UnknownChoice,
                format!("unknown value {}", text.shown()),
            );
            text.error(problem.hint("write \"auto\" for one per core, or a number without quotes"));
        }
        return None;
    }
    value
        .integer()
        .and_then(|workers| NonZeroUsize::new(to_usize(workers)))
}

/// Converts a value that was checked against a bound far below 32 bits.
pub(super) fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

pub(super) fn admin(
    file: &Section<'_>,
    base_dir: &Path,
    listeners: &[(listener::ListenerSettings, std::ops::Range<usize>)],
    identity: &identity::IdentitySettings,
) -> Option<AdminSettings> {
    let section = file.table("admin", &keys::ADMIN);
    let written = section.get("address").map(|value| value.text());
    let token_file = section.get("token_file").map(|value| value.text());
    let believed = section.texts("check_identity_from").unwrap_or_default();
    section.finish();
    warn_of_nobody(&believed, identity);
    let check_identity_from = TrustedProxies::new(&networks(&believed));
    let (address, span) = match written {
        Some(text) => {
            let text = text?;
            (text.parse("an address", parse_address)?, text.span)
        }
        None => (DEFAULT_ADMIN, 0..0),
    };
    let error = |problem| file.document.error(span.clone(), problem);
    let token = match token_file {
        Some(text) => Some(read_token(&text?, base_dir)?),
        None => None,
    };
    if token.is_none() && !address.ip().is_loopback() {
        let message = "the admin listener is reachable from other machines and has no token";
        let hint = "listen on 127.0.0.1, or add token_file = \"admin.token\" to [admin]";
        error(PendingDiagnostic::new(Code::AdminWithoutToken, message).hint(hint));
    }
    let same =
        |settings: &listener::ListenerSettings| settings.address == BindAddress::Tcp(address);
    if address.port() != 0 && listeners.iter().any(|(settings, _)| same(settings)) {
        let message =
            format!("the admin listener and a [[listen]] table have the same address {address}");
        error(
            PendingDiagnostic::new(Code::Duplicate, message).hint("give one of them another port"),
        );
    }
    Some(AdminSettings {
        address,
        token,
        check_identity_from,
    })
}

/// Warns of a `check_identity_from` without effect: no header names a user, or its peers may not
/// ask `/check`.
fn warn_of_nobody(believed: &[ExpandedText<'_>], identity: &identity::IdentitySettings) {
    let Some(first) = believed.first() else {
        return;
    };
    let from_header = |source: &UserSource| matches!(source, UserSource::Header { .. });
    let asks = !identity.trusted_proxies.is_empty() || identity.trusted_hops.is_some();
    let (message, hint) = if !identity.users.iter().any(from_header) {
        (
            "`check_identity_from` has no effect: no header names a user",
            "add a [[user]] table with from = \"header\", or remove this key",
        )
    } else if !asks {
        (
            "`check_identity_from` has no effect: only trusted proxies may ask /check, and there are none",
            "list them: [client_ip] trusted_proxies = [\"127.0.0.1\"]",
        )
    } else {
        return;
    };
    first.warn(PendingDiagnostic::new(Code::HeaderNeverRead, message).hint(hint));
}

fn parse_address(text: &str) -> Result<SocketAddr, PendingDiagnostic> {
    text.parse().map_err(|_| {
        PendingDiagnostic::new(
            Code::BadAddress,
            format!("{} is not an address", quote(text)),
        )
        .hint("write an IP address and a port, for example \"127.0.0.1:9901\" or \"[::1]:9901\"")
    })
}

/// Reads the token from a file, without the final line break.
fn read_token(path: &ExpandedText<'_>, base_dir: &Path) -> Option<String> {
    const MAX_BYTES: u64 = 4096;
    let bad = |message: String, hint: &str| {
        path.error(PendingDiagnostic::new(Code::BadFile, message).hint(hint));
        None
    };
    let token = match path
        .document
        .files
        .text(&base_dir.join(&path.value), MAX_BYTES)
    {
        Ok(token) => token.trim_end_matches(['\r', '\n']).to_owned(),
        Err(error) => {
            return bad(
                format!("{} cannot be read: {error}", path.shown()),
                read::HINT,
            );
        }
    };
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let message = format!("{} does not hold a token", path.shown());
        return bad(
            message,
            "write one line of visible ASCII characters, for example the output of `openssl rand -hex 32`",
        );
    }
    Some(token)
}

pub(super) fn log(file: &Section<'_>) -> Option<LogSettings> {
    let section = file.table("log", &keys::LOG);
    let level = section.choice(
        "level",
        &[
            ("info", LogLevel::Info),
            ("error", LogLevel::Error),
            ("warn", LogLevel::Warn),
            ("debug", LogLevel::Debug),
            ("trace", LogLevel::Trace),
        ],
    );
    let format = section.choice(
        "format",
        &[
            ("auto", LogFormat::Auto),
            ("text", LogFormat::Text),
            ("json", LogFormat::Json),
        ],
    );
    let access = section.choice(
        "access",
        &[
            ("rejected", AccessLines::Rejected),
            ("all", AccessLines::All),
            ("off", AccessLines::Off),
        ],
    );
    let sample = section.share("sample");
    let max_rejected = section.integer("max_rejected");
    section.finish();
    Some(LogSettings {
        level: level?,
        format: format?,
        access: access?,
        sample_ppm: sample.ppm(),
        max_rejected: u32::try_from(max_rejected).unwrap_or(u32::MAX),
    })
}

pub(super) fn trace(file: &Section<'_>) -> TraceSettings {
    let section = file.table("trace", &keys::TRACE);
    let endpoint = section.get("otlp_endpoint").and_then(|value| value.text());
    let sample = section.share("sample");
    section.finish();
    let collector = endpoint.filter(|text| !text.value.is_empty());
    let collector = collector.and_then(|text| {
        text.parse("the address of a collector", |value| {
            Collector::parse(value).map_err(|bad| {
                let message = format!("{} is not the address of a collector: {bad}", quote(value));
                let hint = "write \"http://127.0.0.1:4317\", or https://";
                PendingDiagnostic::new(Code::BadAddress, message).hint(hint)
            })
        })
    });
    TraceSettings {
        collector,
        sample_ppm: sample.ppm(),
    }
}
