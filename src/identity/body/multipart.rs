//! Multipart forms (`multipart/form-data`, RFC 7578), exactly as browsers and HTTP libraries write
//! them.
//!
//! Parsers of this format are lenient in different ways. A body that deviates from this layout is
//! unclear as a whole:
//!
//! ```text
//! --BOUNDARY                                     every line ends with CR LF
//! Content-Disposition: form-data; name="NAME"    `; filename="FILE"` marks a file
//! Content-Type: …                                only files have a type
//!
//! VALUE
//! --BOUNDARY--                                   the boundary occurs nowhere else
//! ```

use super::{
    super::text::{FieldValue, may_mean},
    names::{is_prototype, is_utf8_form},
};

/// RFC 2046 §5.1.1.
const BOUNDARY_MAX_BYTES: usize = 70;

/// The boundary, if it is the only parameter and needs no quotes.
pub(super) fn boundary(parameters: &str) -> Option<String> {
    let (name, boundary) = parameters.trim_matches([' ', '\t']).split_once('=')?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    let fits = (1..=BOUNDARY_MAX_BYTES).contains(&boundary.len()) && boundary.bytes().all(is_plain);
    (name.eq_ignore_ascii_case("boundary") && fits).then(|| boundary.to_owned())
}

/// Reads fields from a form. `None` if it deviates from the layout above.
pub(super) fn read(
    bytes: &[u8],
    boundary: &str,
    fields: &mut [(String, FieldValue)],
) -> Option<()> {
    let delimiter = format!("--{boundary}");
    let mut rest = bytes.strip_prefix(delimiter.as_bytes())?;
    loop {
        // a delimiter is followed by the end or by a part
        if matches!(rest, b"--" | b"--\r\n") {
            return Some(());
        }
        let part = rest.strip_prefix(b"\r\n")?;
        let end = find(part, delimiter.as_bytes())?;
        let (part, after) = (&part[..end], &part[end + delimiter.len()..]);
        read_part(part.strip_suffix(b"\r\n")?, fields)?;
        rest = after;
    }
}

fn read_part(part: &[u8], fields: &mut [(String, FieldValue)]) -> Option<()> {
    let head_end = find(part, b"\r\n\r\n")?;
    let head = std::str::from_utf8(&part[..head_end]).ok()?;
    let value = &part[head_end + 4..];
    let mut lines = head.split("\r\n");
    let (name, is_file) = named(lines.next()?)?;
    let typed = lines.next();
    let is_type = |line: &str| {
        let is_type = line
            .get(..13)
            .is_some_and(|name| name.eq_ignore_ascii_case("content-type:"));
        is_type && !line.contains(|c: char| c.is_control())
    };
    if lines.next().is_some() || !typed.is_none_or(|line| is_file && is_type(line)) {
        return None;
    }
    if is_prototype(name) || !is_utf8_form(name, &String::from_utf8_lossy(value)) {
        return None;
    }
    for (wanted, given) in fields {
        if may_mean(name, wanted) {
            match std::str::from_utf8(value) {
                Ok(text) if !is_file => given.add(text),
                _ => *given = FieldValue::Unclear,
            }
        }
    }
    Some(())
}

/// The name of a part, and whether the part is a file.
fn named(line: &str) -> Option<(&str, bool)> {
    const START: &str = "content-disposition: form-data; name=\"";
    let start = line.get(..START.len())?;
    if !start.eq_ignore_ascii_case(START) {
        return None;
    }
    let (name, rest) = line[START.len()..].split_once('"')?;
    let file = match rest {
        "" => None,
        rest => Some(rest.strip_prefix("; filename=\"")?.strip_suffix('"')?),
    };
    // parsers read escaped quotes in four ways
    let is_plain =
        |text: &str| !text.contains(|c: char| matches!(c, '"' | '\\' | '%') || c.is_control());
    (is_plain(name) && file.is_none_or(is_plain)).then_some((name, file.is_some()))
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = *wanted.first()?;
    let mut from = 0;
    loop {
        from += bytes[from..].iter().position(|byte| *byte == first)?;
        if bytes[from..].starts_with(wanted) {
            return Some(from);
        }
        from += 1;
    }
}
