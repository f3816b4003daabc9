//! Texts in JSON bodies: escaped, and of bounded length.

use bytes::BytesMut;

use crate::telemetry::json;

/// No value in a body is longer: names come from the configuration, IDs from tidegate or a trusted
/// proxy.
pub(super) const VALUE_MAX_BYTES: usize = 1024;

pub(super) fn put(out: &mut BytesMut, text: &str) {
    json::put_string(out, text.as_bytes(), VALUE_MAX_BYTES);
}

/// A policy text escaped for a JSON string. Escaped once, then copied into each body.
pub(super) fn escaped(text: &str) -> Box<[u8]> {
    let mut out = Vec::with_capacity(text.len());
    json::put_escaped(&mut out, text.as_bytes(), VALUE_MAX_BYTES);
    out.into()
}
