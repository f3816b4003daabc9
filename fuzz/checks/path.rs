//! Bytes as a request target: an accepted target has one spelling, and every server reads the same
//! path from it.
//!
//! Servers differ in what they do first: decode escapes, or resolve `..`. Routes and limits use the
//! match key, so a request that a server reads as another path would evade a limit.

use std::borrow::Cow;

use http::{Uri, uri::PathAndQuery};
use tidegate::route::path::{normalise, normalise_target};

/// Bytes as a target in origin form.
pub fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(target) = normalise_target(&text) else {
        return;
    };
    let raw = text.split('?').next().unwrap_or_default();
    let (forward, key) = (&*target.path.forward, &*target.path.key);
    assert!(forward.len() <= raw.len(), "the path grew");

    let again = normalise(forward).expect("a normal path is acceptable");
    assert_eq!(again, target.path, "the normal form is a fixed point");
    assert!(
        matches!(again.forward, Cow::Borrowed(_)),
        "a normal path is not copied"
    );
    let of_key = normalise(key).expect("a key is a path");
    assert_eq!((&*of_key.forward, &*of_key.key), (key, key));

    // The request parser accepts fewer characters.
    if PathAndQuery::try_from(&*text).is_ok() {
        check_passed_on(forward, target.query);
    }
    check_servers(raw, forward, key);
}

/// Checks that the next parser splits the target at the same place.
fn check_passed_on(forward: &str, query: Option<&str>) {
    let written = match query {
        Some(query) => format!("{forward}?{query}"),
        None => forward.to_owned(),
    };
    let target = PathAndQuery::try_from(&*written).expect("a forwarded path is a valid target");
    assert_eq!((target.path(), target.query()), (forward, query));
    let uri = Uri::try_from(format!("http://host{written}")).expect("and part of a URL");
    assert_eq!((uri.path(), uri.query()), (forward, query));
}

fn check_servers(raw: &str, forward: &str, key: &str) {
    let decoded_first = |path: &str| resolve(&decode(path.as_bytes()));
    let resolved_first = |path: &str| {
        let path = resolve(path.as_bytes())?;
        Some(decode(&path))
    };
    let read = decoded_first(forward).expect("a normal path stays below the root");
    assert_eq!(
        Some(&read),
        resolved_first(forward).as_ref(),
        "servers read the forwarded path differently"
    );
    assert_eq!(
        Some(&read),
        decoded_first(raw).as_ref(),
        "normalising changes the path"
    );
    // A server that ignores parameters and trailing slashes reads the key.
    let bare: Vec<_> = forward.split('/').map(before_parameters).collect();
    let bare = decoded_first(&bare.join("/")).expect("below the root");
    let of_key = decoded_first(key).expect("below the root");
    assert_eq!(trimmed(&bare), trimmed(&of_key), "the key is another path");
    for segment in key.split('/') {
        assert!(
            !matches!(segment, "." | "..") && !segment.contains(';'),
            "{key}"
        );
    }
}

fn before_parameters(segment: &str) -> &str {
    segment.split(';').next().unwrap_or_default()
}

fn trimmed(path: &[u8]) -> &[u8] {
    path.strip_suffix(b"/").unwrap_or(path)
}

/// Decodes every escape once.
fn decode(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let [byte, after @ ..] = rest {
        rest = after;
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        match (byte, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                out.push(u8::try_from(high * 16 + low).expect("two digits are a byte"));
                rest = &after[2..];
            }
            _ => out.push(*byte),
        }
    }
    out
}

/// Merges slashes and resolves dot segments; `None` above the root.
fn resolve(path: &[u8]) -> Option<Vec<u8>> {
    let mut segments: Vec<&[u8]> = Vec::new();
    let mut is_folder = true;
    for segment in path.split(|&byte| byte == b'/') {
        is_folder = matches!(segment, b"" | b"." | b"..");
        match segment {
            b"" | b"." => {}
            b".." => {
                segments.pop()?;
            }
            name => segments.push(name),
        }
    }
    let mut out = Vec::new();
    for segment in &segments {
        out.push(b'/');
        out.extend_from_slice(segment);
    }
    if is_folder {
        out.push(b'/');
    }
    Some(out)
}
