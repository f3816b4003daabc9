//! Checks that a request is valid before any decision (RFC 9110 §7, RFC 9112 §3, RFC 9113 §8.3).
//!
//! hyper parses; this module checks the target authority and the framing. It rejects input that two
//! parsers could read differently, so the origin sees the request that was decided on.

use http::{
    HeaderMap, HeaderValue, Method, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, SEC_WEBSOCKET_KEY, TRANSFER_ENCODING, UPGRADE},
    request::Parts,
};

use super::ListenerSettings;

/// Why a request is rejected as malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not a valid request; 400, and the connection closes.
    #[error("{0}")]
    Invalid(&'static str),
    /// The target is longer than the listener allows; 414.
    #[error("the request target is too long")]
    TargetTooLong,
    /// There are too many fields, or too large ones; 431.
    #[error("the request fields are too large")]
    FieldsTooLarge,
    /// CONNECT; 501, and the connection closes: the client may already have sent bytes meant for
    /// the tunnel (RFC 9931 §4).
    #[error("CONNECT is not supported")]
    Tunnel,
    /// TRACE; 405. The response would reveal the fields that the gateway adds for the upstream.
    #[error("TRACE is not supported")]
    Trace,
    /// An unsupported transfer coding; 501.
    #[error("the transfer coding is not supported")]
    CodingNotKnown,
}

/// The target of a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addressed<'a> {
    /// The authority as the client wrote it; empty only in HTTP/1.0.
    pub authority: &'a str,
    /// Its host without port and trailing dot, in the client's case.
    pub host: &'a str,
    /// The target's path; `*` for the whole server.
    pub path: &'a str,
    /// What follows the first `?`.
    pub query: Option<&'a str>,
    /// Whether this is a WebSocket handshake.
    pub websocket: bool,
}

/// Validates a request and returns its target. Allocates nothing.
pub fn check<'a>(
    parts: &'a Parts,
    settings: &ListenerSettings,
) -> Result<Addressed<'a>, Malformed> {
    let seen = check_size(parts, settings)?;
    match parts.method {
        Method::CONNECT => return Err(Malformed::Tunnel),
        Method::TRACE => return Err(Malformed::Trace),
        // an HTTP/2 server could take it for the preface (RFC 9113 §11.6)
        ref method if method.as_str() == "PRI" => {
            return Err(Malformed::Invalid("PRI is not a method."));
        }
        _ => {}
    }
    if seen.coding {
        check_framing(&parts.headers)?;
    }
    let (authority, host) = match parts.version {
        Version::HTTP_2 => {
            check_values(&parts.headers)?;
            named(authority_http2(parts)?)?
        }
        _ => authority_http1(parts)?,
    };
    let path = check_target(parts)?;
    let websocket = seen.upgrade && asks_for_websocket(parts);
    if websocket {
        check_handshake(parts)?;
    }
    Ok(Addressed {
        authority,
        host,
        path,
        query: parts.uri.query(),
        websocket,
    })
}

/// Whether the client requests a WebSocket. All other upgrades are ignored, as RFC 9110 §7.8
/// allows. `h2c` in particular would carry requests that bypass the limits.
pub fn asks_for_websocket(parts: &Parts) -> bool {
    let lists = |name, token: &[u8]| {
        let lines = parts.headers.get_all(name).iter();
        let mut tokens = lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b','));
        tokens.any(|listed| listed.trim_ascii().eq_ignore_ascii_case(token))
    };
    parts.version == Version::HTTP_11
        && parts.headers.contains_key(UPGRADE)
        && lists(UPGRADE, b"websocket")
        && lists(CONNECTION, b"upgrade")
}

/// RFC 6455 §4.2.1. The server checks the version.
fn check_handshake(parts: &Parts) -> Result<(), Malformed> {
    let mut keys = parts.headers.get_all(SEC_WEBSOCKET_KEY).iter();
    let is_key = |key: &HeaderValue| {
        // 16 bytes in Base64
        let key = key.as_bytes();
        key.len() == 24
            && key.ends_with(b"==")
            && key[..22]
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(byte))
    };
    let has_body = parts.headers.contains_key(TRANSFER_ENCODING)
        || parts
            .headers
            .get(CONTENT_LENGTH)
            .is_some_and(|length| length != "0");
    if parts.method != Method::GET || has_body {
        return Err(Malformed::Invalid(
            "A WebSocket begins with a GET without a body.",
        ));
    }
    match (keys.next(), keys.next()) {
        (Some(key), None) if is_key(key) => Ok(()),
        _ => Err(Malformed::Invalid("There is no valid Sec-WebSocket-Key.")),
    }
}

/// Rare fields that need a check of their own when present.
#[derive(Debug, Default)]
struct RareFields {
    coding: bool,
    upgrade: bool,
}

fn check_size(parts: &Parts, settings: &ListenerSettings) -> Result<RareFields, Malformed> {
    let target = parts
        .uri
        .path_and_query()
        .map_or(0, |target| target.as_str().len());
    if target > settings.max_uri_bytes {
        return Err(Malformed::TargetTooLong);
    }
    if parts.headers.len() > settings.max_header_count {
        return Err(Malformed::FieldsTooLarge);
    }
    let mut seen = RareFields::default();
    let mut bytes = target;
    for (name, value) in &parts.headers {
        // a line is its name, ": ", its value and CR LF
        bytes += name.as_str().len() + value.len() + 4;
        seen.coding |= *name == TRANSFER_ENCODING;
        seen.upgrade |= *name == UPGRADE;
    }
    if bytes > settings.max_header_bytes {
        return Err(Malformed::FieldsTooLarge);
    }
    Ok(seen)
}

/// Rejects white space at either end of a value, which HTTP/1.1 would have trimmed (RFC 9113
/// §8.2.1): ` key` and `key` would be two buckets.
fn check_values(headers: &HeaderMap) -> Result<(), Malformed> {
    let padded = |value: &HeaderValue| {
        let ends = [value.as_bytes().first(), value.as_bytes().last()];
        ends.into_iter()
            .flatten()
            .any(|byte| matches!(byte, b' ' | b'\t'))
    };
    match headers.values().any(padded) {
        true => Err(Malformed::Invalid(
            "A field's value begins or ends with white space.",
        )),
        false => Ok(()),
    }
}

/// Accepts exactly one `chunked`. hyper also accepts a coding before `chunked`, and `chunked`
/// twice.
fn check_framing(headers: &HeaderMap) -> Result<(), Malformed> {
    let mut codings = headers
        .get_all(TRANSFER_ENCODING)
        .iter()
        .flat_map(|line| line.as_bytes().split(|&byte| byte == b','));
    let mut chunked = false;
    for coding in codings
        .by_ref()
        .map(<[u8]>::trim_ascii)
        .filter(|coding| !coding.is_empty())
    {
        match coding.eq_ignore_ascii_case(b"chunked") {
            _ if chunked => return Err(Malformed::Invalid("The body is chunked more than once.")),
            true => chunked = true,
            false => return Err(Malformed::CodingNotKnown),
        }
    }
    Ok(())
}

/// An authority, and its host.
type AuthorityAndHost<'a> = (&'a str, &'a str);

fn named(authority: &str) -> Result<AuthorityAndHost<'_>, Malformed> {
    match host_of(authority) {
        Some(host) => Ok((authority, host)),
        None => Err(Malformed::Invalid("The host is not valid.")),
    }
}

/// The one `Host`, unless the target is absolute: then the target's authority (RFC 9112 §3.2.2).
fn authority_http1(parts: &Parts) -> Result<AuthorityAndHost<'_>, Malformed> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let line = lines.next();
    if lines.next().is_some() {
        return Err(Malformed::Invalid("There is more than one Host."));
    }
    let line = line.map(text).transpose()?;
    let host = match line {
        None | Some("") => None,
        Some(line) => Some((
            line,
            host_of(line).ok_or(Malformed::Invalid("The Host is not valid."))?,
        )),
    };
    if let Some(authority) = parts.uri.authority() {
        // without a scheme it is authority-form, which only CONNECT may use
        return match parts.uri.scheme_str() {
            Some("http" | "https") => named(authority.as_str()),
            _ => Err(Malformed::Invalid("The request target is not valid.")),
        };
    }
    match (host, line) {
        (Some(host), _) => Ok(host),
        (None, None) if parts.version == Version::HTTP_10 => Ok(("", "")),
        (None, Some(_)) => Err(Malformed::Invalid("The Host is empty.")),
        (None, None) => Err(Malformed::Invalid("There is no Host.")),
    }
}

/// `:authority`, or one `Host`; both only if they agree (RFC 9113 §8.3.1).
fn authority_http2(parts: &Parts) -> Result<&str, Malformed> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let host = lines.next().map(text).transpose()?;
    if lines.next().is_some() {
        return Err(Malformed::Invalid("There is more than one Host."));
    }
    match (parts.uri.authority(), host) {
        (Some(authority), Some(host)) if !authority.as_str().eq_ignore_ascii_case(host) => {
            Err(Malformed::Invalid("The Host differs from the authority."))
        }
        (Some(authority), _) => Ok(authority.as_str()),
        (None, Some(host)) if !host.is_empty() => Ok(host),
        (None, _) => Err(Malformed::Invalid("There is no authority.")),
    }
}

fn text(value: &HeaderValue) -> Result<&str, Malformed> {
    value
        .to_str()
        .map_err(|_| Malformed::Invalid("The Host is not valid."))
}

/// Origin-form or absolute-form; `*` for OPTIONS only.
fn check_target(parts: &Parts) -> Result<&str, Malformed> {
    let uri = &parts.uri;
    let begins_with_a_slash = uri
        .path_and_query()
        .is_some_and(|target| target.as_str().starts_with('/'));
    match uri.path() {
        "*" if parts.method == Method::OPTIONS => Ok("*"),
        path if begins_with_a_slash => Ok(path),
        // `http://host` and `http://host?query` have an empty path, which means the root (RFC 3986
        // §6.2.3); a `:path` must begin with a slash (RFC 9113 §8.3.1)
        "" | "/" if uri.scheme().is_some() && parts.version < Version::HTTP_2 => Ok("/"),
        _ => Err(Malformed::Invalid("The request target is not valid.")),
    }
}

/// Bytes allowed in host names: unreserved characters and sub-delims, except the comma, which
/// separates list elements.
static IN_NAMES: [bool; 256] = {
    let others = b"-._~!$&'()*+;=";
    let mut allowed = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        allowed[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut at = 0;
    while at < others.len() {
        allowed[others[at] as usize] = true;
        at += 1;
    }
    allowed
};

/// The host of `host[:port]`, or `None` if invalid: RFC 3986 §3.2.2 without user information, and
/// without percent-escapes, which would be a second spelling.
fn host_of(authority: &str) -> Option<&str> {
    let (host, port) = if authority.starts_with('[') {
        let (address, rest) = authority.split_at(authority.find(']')? + 1);
        address[1..address.len() - 1]
            .parse::<std::net::Ipv6Addr>()
            .ok()?;
        (
            address,
            rest.strip_prefix(':')
                .map_or_else(|| rest.is_empty().then_some(""), Some)?,
        )
    } else {
        let colon = authority.bytes().position(|byte| byte == b':');
        let (host, port) = colon.map_or((authority, ""), |colon| {
            (&authority[..colon], &authority[colon + 1..])
        });
        if host.is_empty() || !host.bytes().all(|byte| IN_NAMES[usize::from(byte)]) {
            return None;
        }
        (
            host.strip_suffix('.')
                .filter(|host| !host.is_empty())
                .unwrap_or(host),
            port,
        )
    };
    let valid_port = port.is_empty()
        || (port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok());
    valid_port.then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_read_without_its_port_and_trailing_dot() {
        for (authority, host) in [
            ("a.example", "a.example"),
            ("a.example:8080", "a.example"),
            ("a.example.", "a.example"),
            ("A.example.:80", "A.example"),
            ("[2001:db8::1]:8443", "[2001:db8::1]"),
            ("[::1]", "[::1]"),
            ("a.example:", "a.example"),
        ] {
            assert_eq!(host_of(authority), Some(host), "{authority}");
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for authority in [
            "", "a b", "u@a", "a/x", "a, b", "a:99999", "a:b", "[::1", "[x]", "[::1]x", "a:80:80",
            "%61", ":80", "é", "a\t",
        ] {
            assert_eq!(host_of(authority), None, "{authority}");
        }
    }
}
