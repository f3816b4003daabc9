//! Parser for `Forwarded` (RFC 7239 §4): quoted strings, brackets, ports, obfuscated and unknown
//! nodes.
//!
//! A field with a syntax error in any of its lines is ignored entirely. Commas and semicolons
//! separate only outside quotes, so after an error the element boundaries are unknown.

use std::{borrow::Cow, net::IpAddr};

use arrayvec::ArrayVec;
use http::{HeaderMap, header::FORWARDED};

use super::address::{AddressFault, ELEMENTS_MAX, Element, is_port, parse, trim};

/// The longest quoted value that is unescaped; longer than any node with a port.
const VALUE_MAX_BYTES: usize = 256;

/// The rightmost elements of the field, from the right: at most [`ELEMENTS_MAX`] plus one. All
/// lines form one list. Linear in the field's length. Allocates only for values with backslashes.
pub(super) fn elements(
    headers: &HeaderMap,
) -> Result<impl Iterator<Item = Element<'_>>, AddressFault> {
    const KEPT: usize = ELEMENTS_MAX + 1;
    // ring buffer: element n is stored at n modulo its length, so the last ones survive
    let mut ring = ArrayVec::<Raw<'_>, KEPT>::new();
    let mut count = 0;
    for line in headers.get_all(FORWARDED) {
        let mut rest = Some(line.as_bytes());
        while let Some(text) = rest {
            let (element, after) = element(text).ok_or(AddressFault::Malformed)?;
            if let Err(full) = ring.try_push(element) {
                ring[count % KEPT] = full.element();
            }
            count += 1;
            rest = after;
        }
    }
    let from_the_right = (count.saturating_sub(KEPT)..count).rev();
    Ok(from_the_right.map(move |at| ring[at % KEPT].read()))
}

/// One element as written.
#[derive(Clone, Copy)]
struct Raw<'a> {
    text: &'a [u8],
    /// The value of its `for` parameter.
    node: Option<ParameterValue<'a>>,
}

impl<'a> Raw<'a> {
    fn read(self) -> Element<'a> {
        let node = self.node.and_then(ParameterValue::unescape);
        Element {
            text: self.text,
            address: node.and_then(|node| node_address(&node)),
        }
    }
}

/// Parses one element: `[ pair ] *( ";" [ pair ] )`, with optional whitespace around it. Returns
/// the element and the text after its comma. `None` on a syntax error.
fn element(text: &[u8]) -> Option<(Raw<'_>, Option<&[u8]>)> {
    let mut rest = skip_whitespace(text);
    let mut seen = ParametersSeen::default();
    let mut node = None;
    loop {
        if let [b',' | b';' | b' ' | b'\t', ..] | [] = rest {
            // an empty pair is allowed
        } else {
            let (name, value, after) = pair(rest)?;
            if seen.mark_seen(name)? == Some(FOR) {
                node = Some(value);
            }
            rest = after;
        }
        match rest {
            [b';', after @ ..] => rest = after,
            _ => break,
        }
    }
    let end = text.len() - rest.len();
    let after = match skip_whitespace(rest) {
        [] => None,
        [b',', after @ ..] => Some(after),
        _ => return None,
    };
    Some((
        Raw {
            text: trim(&text[..end]),
            node,
        },
        after,
    ))
}

fn skip_whitespace(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = text {
        text = rest;
    }
    text
}

/// The registered parameters that an element has so far. Each may occur once (RFC 7239 §4).
#[derive(Default)]
struct ParametersSeen([bool; REGISTERED.len()]);

const REGISTERED: [&[u8]; 4] = [b"for", b"by", b"host", b"proto"];
const FOR: usize = 0;

impl ParametersSeen {
    /// The index of `name` in [`REGISTERED`], if any. `None` if the parameter is repeated.
    fn mark_seen(&mut self, name: &[u8]) -> Option<Option<usize>> {
        let at = REGISTERED
            .iter()
            .position(|known| name.eq_ignore_ascii_case(known));
        let again = at.is_some_and(|at| std::mem::replace(&mut self.0[at], true));
        (!again).then_some(at)
    }
}

/// A parameter value as written.
#[derive(Clone, Copy)]
enum ParameterValue<'a> {
    Token(&'a [u8]),
    /// Without its quotes, but still escaped.
    Quoted(&'a [u8]),
}

impl<'a> ParameterValue<'a> {
    /// The unescaped value; `None` if it is too long to be a node.
    fn unescape(self) -> Option<Cow<'a, [u8]>> {
        match self {
            ParameterValue::Token(text) => Some(Cow::Borrowed(text)),
            ParameterValue::Quoted(text) if text.len() > VALUE_MAX_BYTES => None,
            ParameterValue::Quoted(text) if !text.contains(&b'\\') => Some(Cow::Borrowed(text)),
            ParameterValue::Quoted(text) => {
                let mut bytes = text.iter().copied();
                let next = || match bytes.next() {
                    Some(b'\\') => bytes.next(),
                    byte => byte,
                };
                Some(Cow::Owned(std::iter::from_fn(next).collect()))
            }
        }
    }
}

/// Parses `token "=" ( token | quoted-string )` into name, value and the remaining text.
fn pair(text: &[u8]) -> Option<(&[u8], ParameterValue<'_>, &[u8])> {
    let (name, rest) = token(text)?;
    let rest = rest.strip_prefix(b"=")?;
    let Some(quoted) = rest.strip_prefix(b"\"") else {
        let (value, rest) = token(rest)?;
        return Some((name, ParameterValue::Token(value), rest));
    };
    let mut at = 0;
    loop {
        match *quoted.get(at)? {
            b'"' => {
                return Some((
                    name,
                    ParameterValue::Quoted(&quoted[..at]),
                    &quoted[at + 1..],
                ));
            }
            // a backslash escapes the next byte (RFC 9110 §5.6.4)
            b'\\' => {
                is_text(*quoted.get(at + 1)?).then_some(())?;
                at += 2;
            }
            byte => {
                is_text(byte).then_some(())?;
                at += 1;
            }
        }
    }
}

fn is_text(byte: u8) -> bool {
    matches!(byte, b'\t' | 0x20..=0x7e | 0x80..=0xff)
}

/// Parses one or more token characters (RFC 9110 §5.6.2).
fn token(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = text
        .iter()
        .position(|byte| !TOKEN[usize::from(*byte)])
        .unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// Token characters, as a lookup table because each byte is tested.
const TOKEN: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = (byte as u8).is_ascii_alphanumeric()
            || matches!(byte as u8, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~');
        byte += 1;
    }
    table
};

/// The address of `node = nodename [ ":" node-port ]` (RFC 7239 §6). `None` for `unknown`, an
/// obfuscated name or an invalid node. An IPv6 address must be in brackets.
fn node_address(node: &[u8]) -> Option<IpAddr> {
    let (name, port) = match node.iter().position(|&byte| byte == b']') {
        Some(bracket) => node.split_at(bracket + 1),
        None => node.split_at(
            node.iter()
                .position(|&byte| byte == b':')
                .unwrap_or(node.len()),
        ),
    };
    let is_port = match port {
        [] => true,
        [b':', b'_', obfuscated @ ..] => {
            let is_obfuscated = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
            !obfuscated.is_empty() && obfuscated.iter().all(is_obfuscated)
        }
        [b':', digits @ ..] => str::from_utf8(digits).is_ok_and(is_port),
        _ => false,
    };
    if is_port { parse(name) } else { None }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn read(lines: &[&str]) -> Result<Vec<(String, Option<String>)>, AddressFault> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED, HeaderValue::from_str(line).expect("a value"));
        }
        let shown = |element: Element<'_>| {
            (
                String::from_utf8_lossy(element.text).into_owned(),
                element.address.map(|address| address.to_string()),
            )
        };
        Ok(elements(&headers)?.map(shown).collect())
    }

    fn addresses(lines: &[&str]) -> Result<Vec<Option<String>>, AddressFault> {
        Ok(read(lines)?
            .into_iter()
            .map(|(_, address)| address)
            .collect())
    }

    #[test]
    fn lines_are_one_list_from_the_right() {
        let found = read(&["for=1.1.1.1;proto=http , for=2.2.2.2", "for=\"[::1]:80\""])
            .expect("well-formed");
        let texts: Vec<_> = found.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(
            texts,
            ["for=\"[::1]:80\"", "for=2.2.2.2", "for=1.1.1.1;proto=http"]
        );
        let addresses: Vec<_> = found
            .iter()
            .filter_map(|(_, address)| address.as_deref())
            .collect();
        assert_eq!(addresses, ["::1", "2.2.2.2", "1.1.1.1"]);
    }

    #[test]
    fn node_without_an_address_is_an_element_without_an_address() {
        for value in [
            "for=unknown",
            "for=_hidden",
            "by=1.2.3.4",
            "for=\"\"",
            "for=\"1.2.3.4:\"",
            "for=\"::1\"",
            "for=\"1.2.3.4:65536\"",
            "for=\"1.2.3.4:_\"",
        ] {
            assert_eq!(addresses(&[value]), Ok(vec![None]), "{value}");
        }
    }

    #[test]
    fn unknown_parameters_are_tolerated_and_may_repeat() {
        assert_eq!(
            addresses(&["x=1;x=2;for=1.2.3.4;secret=\"a,b;c\\\"d\""]),
            Ok(vec![Some("1.2.3.4".to_owned())])
        );
    }

    #[test]
    fn broken_grammar_anywhere_spoils_the_field() {
        for value in [
            "for",
            "for=",
            "=1.2.3.4",
            "for=1.2.3.4 proto=http",
            "for=1.2.3.4; proto=http",
            "for=1.2.3.4;FOR=1.2.3.4",
            "for=\"1.2.3.4",
            "for=\"1.2.3.4\\",
            "for=\"1.2.3.4\"x",
            "for=1.2.3.4:80",
            "for= 1.2.3.4",
            "for=1.2.3.4, @",
        ] {
            assert_eq!(
                addresses(&["for=2.2.2.2", value]),
                Err(AddressFault::Malformed),
                "{value}"
            );
        }
    }

    #[test]
    fn quoted_string_does_not_span_lines() {
        assert_eq!(addresses(&["for=\"a", "b\""]), Err(AddressFault::Malformed));
    }

    #[test]
    fn one_element_more_than_are_walked_is_kept() {
        let many = vec!["for=10.0.0.1"; 10_000].join(",");
        let found = read(&[&many, "for=10.0.0.2"]).expect("well-formed");
        let texts: Vec<_> = found.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(texts.len(), ELEMENTS_MAX + 1);
        assert_eq!(texts[..2], ["for=10.0.0.2", "for=10.0.0.1"]);
    }

    proptest! {
        #[test]
        fn no_field_panics(value in prop::collection::vec(prop::sample::select(b"for=by;, \t\"\\[]:_.19a\xff".to_vec()), 0..60)) {
            let mut headers = HeaderMap::new();
            headers.insert(FORWARDED, HeaderValue::from_bytes(&value).expect("no controls"));
            let _ = elements(&headers).map(Iterator::count);
        }
    }
}
