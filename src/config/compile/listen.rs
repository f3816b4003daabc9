//! `[[listen]]`: the listeners.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use ipnet::IpNet;

use super::{process::to_usize, tls};
use crate::{
    config::{
        ProcessSettings,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
    },
    identity::{self, TrustedProxies},
    listener::{
        BindAddress, ListenerSettings, ProxyProtocol, UNIX_PEER,
        connections_per_address::AddressLimits,
    },
};

const DEFAULT_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);

/// Compiles the listeners, each with its span. Without a `[[listen]]` table there is one, on
/// 127.0.0.1:8080.
pub(super) fn compile(
    file: &Section<'_>,
    base_dir: &Path,
    identity: &identity::IdentitySettings,
    server: &ProcessSettings,
) -> Vec<(ListenerSettings, Range<usize>)> {
    let per_address = per_address(identity, server);
    let trusted_proxies = &identity.trusted_proxies;
    let tables = file.repeated("listen");
    if tables.is_empty() {
        let section = Section::open(
            file.document,
            "[[listen]]".to_owned(),
            0..0,
            &keys::LISTEN,
            None,
        );
        section.get("address");
        let default = BindAddress::Tcp(DEFAULT_ADDRESS);
        let settings = settings(section, default, base_dir, trusted_proxies, per_address);
        return vec![(settings, 0..0)];
    }
    let mut listeners: Vec<(ListenerSettings, Range<usize>)> = Vec::new();
    for table in tables {
        let Some(section) = Section::of(&table, "[[listen]]".to_owned(), &keys::LISTEN) else {
            continue;
        };
        let written = section.require("address", "add address = \"0.0.0.0:8080\"");
        let written = written.and_then(|value| value.text());
        let address = written.as_ref().and_then(address);
        if let (Some(address), Some(written)) = (&address, &written) {
            let earlier = listeners
                .iter()
                .find(|(settings, _)| settings.address == *address);
            if let Some((_, first)) = earlier.filter(|_| !any_port(address)) {
                let line = file.document.source.line(first.start);
                let message = format!("two listeners have the address {}", written.shown());
                let problem = PendingDiagnostic::new(Code::Duplicate, message);
                written.error(problem.hint(format!(
                    "the first is on line {line}: remove one, or change its port"
                )));
            }
        }
        let span = table.name_span();
        let address = address.unwrap_or(BindAddress::Tcp(DEFAULT_ADDRESS));
        let settings = settings(
            section,
            address,
            base_dir,
            trusted_proxies,
            per_address.clone(),
        );
        listeners.push((settings, span));
    }
    listeners
}

fn settings(
    section: Section<'_>,
    address: BindAddress,
    base_dir: &Path,
    trusted_proxies: &[IpNet],
    per_address: AddressLimits,
) -> ListenerSettings {
    let tls = section.get("tls");
    let max_streams = section.integer("max_streams");
    let proxy_protocol = proxy_protocol(&section, &address, trusted_proxies);
    let settings = ListenerSettings {
        address,
        proxy_protocol,
        http2: section.boolean("http2"),
        header_timeout: section.duration("header_timeout"),
        body_timeout: section.duration("body_timeout"),
        min_body_rate: section.size("min_body_rate"),
        idle_timeout: section.duration("idle_timeout"),
        max_header_bytes: to_usize(section.size("max_header_size")),
        max_header_count: to_usize(section.integer("max_header_count")),
        max_uri_bytes: to_usize(section.size("max_uri_size")),
        max_body_bytes: section.size("max_body_size"),
        max_streams: u32::try_from(max_streams).unwrap_or(u32::MAX),
        per_address,
        tls: tls.and_then(|tls| tls::compile(&tls, base_dir)),
    };
    section.finish();
    settings
}

/// The limit on connections per address. It exempts trusted proxies, which carry many clients.
fn per_address(identity: &identity::IdentitySettings, server: &ProcessSettings) -> AddressLimits {
    let all_are_proxies = identity.trusted_hops.is_some() && identity.trusted_proxies.is_empty();
    let trusted = (!all_are_proxies).then(|| TrustedProxies::new(&identity.trusted_proxies));
    AddressLimits {
        most: server.max_connections_per_ip,
        prefixes: identity.prefixes(),
        trusted: trusted.map(Arc::new),
    }
}

fn proxy_protocol(
    section: &Section<'_>,
    address: &BindAddress,
    trusted_proxies: &[IpNet],
) -> ProxyProtocol {
    let required = section.choice("proxy_protocol", &[("off", false), ("required", true)]);
    if required != Some(true) {
        return ProxyProtocol::Off;
    }
    let trusted = TrustedProxies::new(trusted_proxies);
    let problem = match address {
        _ if trusted.is_empty() => Some((
            "no proxy is trusted to send it",
            "list your load balancers: [client_ip] trusted_proxies = [\"10.0.0.0/8\"]",
        )),
        BindAddress::Unix(_) if !trusted.contains(UNIX_PEER) => Some((
            "a peer on a Unix socket counts as 127.0.0.1, which is not trusted",
            "add it: [client_ip] trusted_proxies = [\"127.0.0.1\"]",
        )),
        _ => None,
    };
    if let Some(((why, hint), written)) = problem.zip(section.get("proxy_protocol")) {
        let message = format!(
            "`proxy_protocol` in [[listen]] is \"required\", and {why}: every connection would be closed"
        );
        written.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
    }
    ProxyProtocol::Required(Arc::new(trusted))
}

fn any_port(address: &BindAddress) -> bool {
    matches!(address, BindAddress::Tcp(address) if address.port() == 0)
}

fn address(text: &ExpandedText<'_>) -> Option<BindAddress> {
    text.parse("an address", |value| {
        const HINT: &str =
            "write \"127.0.0.1:8080\" (this machine), \"0.0.0.0:8080\" (every interface), \"[::]:8080\", \"unix:/path\" or \"systemd:NAME\"";
        let bad = |message| PendingDiagnostic::new(Code::BadAddress, message).hint(HINT);
        if let Some(name) = value.strip_prefix("systemd:") {
            return socket_name(name).map(BindAddress::Systemd);
        }
        match value.strip_prefix("unix:") {
            Some(path) => unix_path(path).map(BindAddress::Unix),
            None => value
                .parse()
                .map(BindAddress::Tcp)
                .map_err(|_| bad(format!("{} is not an address to listen on", quote(value)))),
        }
    })
}

/// Parses a name by systemd's rules for `FileDescriptorName=` (systemd.socket(5)).
fn socket_name(name: &str) -> Result<String, PendingDiagnostic> {
    const MAX_BYTES: usize = 255;
    let fits = (1..=MAX_BYTES).contains(&name.len());
    if fits && name.chars().all(|c| c.is_ascii_graphic() && c != ':') {
        return Ok(name.to_owned());
    }
    let message = format!(
        "{} is not a valid FileDescriptorName of a socket unit",
        quote(name)
    );
    Err(PendingDiagnostic::new(Code::BadAddress, message)
        .hint("write systemd: and the FileDescriptorName= of the .socket unit, for example \"systemd:http\""))
}

/// Parses the path of a Unix socket: absolute, and short enough for the kernel.
pub(super) fn unix_path(path: &str) -> Result<PathBuf, PendingDiagnostic> {
    const MAX_BYTES: usize = 107; // sockaddr_un.sun_path, less its final zero
    let problem = if !path.starts_with('/') {
        "is not an absolute path"
    } else if path.len() > MAX_BYTES {
        "is too long for a Unix socket (107 bytes)"
    } else if path.contains('\0') {
        "contains a zero byte"
    } else {
        return Ok(PathBuf::from(path));
    };
    let message = format!("{} {problem}", quote(path));
    Err(PendingDiagnostic::new(Code::BadAddress, message)
        .hint("write unix: and an absolute path, for example \"unix:/run/app.sock\""))
}
