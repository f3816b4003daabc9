//! Checks whether an upstream's `RateLimit` and `RateLimit-Policy` fields are lists as in draft-11,
//! and collects the names in them.
//!
//! Both are Lists of Structured Fields (RFC 9651 §4.2) whose members are names with parameters. A
//! client ignores the whole list if one member is malformed. So tidegate adds members only to
//! well-formed lists, and only under unused names. Token names are accepted beside Strings, as the
//! draft's authors consider. This runs only if the upstream sends such a field.

use http::header::{GetAll, HeaderValue};
use sfv::{BareItem, List, ListEntry, Parameters, Parser};

/// The two list fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListField {
    /// `RateLimit-Policy`; its members need `q`.
    Policies,
    /// `RateLimit`; its members need `r`.
    Standings,
}

/// The names in all lines of the field; `None` if the field does not follow the draft.
pub(super) fn names(listed: ListField, lines: &GetAll<'_, HeaderValue>) -> Option<Vec<String>> {
    let lines: Vec<&[u8]> = lines.iter().map(HeaderValue::as_bytes).collect();
    let list: List = Parser::new(&lines.join(&b", "[..])).parse().ok()?;
    list.into_iter()
        .map(|entry| match entry {
            ListEntry::Item(item) if has_parameters(listed, &item.params) => match item.bare_item {
                BareItem::String(name) => Some(name.into()),
                BareItem::Token(name) => Some(name.into()),
                _ => None,
            },
            _ => None,
        })
        .collect()
}

/// Whether a member has the required parameters, and its known parameters have the right types.
fn has_parameters(listed: ListField, parameters: &Parameters) -> bool {
    let integer = |name: &str| match parameters.get(name) {
        None => Ok(None),
        Some(BareItem::Integer(number)) => Ok(Some(i64::from(*number))),
        Some(_) => Err(()),
    };
    let (amount, seconds, least_seconds) = match listed {
        ListField::Policies => (integer("q"), integer("w"), 1),
        ListField::Standings => (integer("r"), integer("t"), 0),
    };
    let unit_fits = listed != ListField::Policies
        || parameters
            .get("qu")
            .is_none_or(|unit| matches!(unit, BareItem::String(_)));
    let key_fits = parameters
        .get("pk")
        .is_none_or(|key| matches!(key, BareItem::ByteSequence(_)));
    matches!(amount, Ok(Some(0..)))
        && seconds.is_ok_and(|seconds| seconds.is_none_or(|seconds| seconds >= least_seconds))
        && unit_fits
        && key_fits
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName};

    use super::*;

    fn read(listed: ListField, lines: &[&str]) -> Option<Vec<String>> {
        let name = HeaderName::from_static("ratelimit");
        let mut headers = HeaderMap::new();
        for line in lines {
            let value = HeaderValue::from_bytes(line.as_bytes()).expect("fields may hold it");
            headers.append(&name, value);
        }
        names(listed, &headers.get_all(&name))
    }

    fn policies(line: &str) -> Option<Vec<String>> {
        read(ListField::Policies, &[line])
    }

    fn standings(line: &str) -> Option<Vec<String>> {
        read(ListField::Standings, &[line])
    }

    fn some(names: &[&str]) -> Option<Vec<String>> {
        Some(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn policies_of_the_draft_are_read() {
        let two = r#""burst";q=100;w=60,"daily";q=1000;w=86400"#;
        assert_eq!(policies(two), some(&["burst", "daily"]));
        assert_eq!(policies(r#""burst"; q=100; w=60"#), some(&["burst"]));
        // the padding bits of the last digit are not zero
        let key = r#""p";q=100;w=60;pk=:cHsdsRa894==:"#;
        assert_eq!(policies(key), some(&["p"]));
        let slots = r#""inflight";q=20;qu="concurrent-requests""#;
        assert_eq!(policies(slots), some(&["inflight"]));
        assert_eq!(policies("burst;q=100;w=60"), some(&["burst"]), "a Token");
    }

    #[test]
    fn standings_of_the_draft_are_read() {
        assert_eq!(standings(r#""default";r=50;t=30"#), some(&["default"]));
        let key = r#""default";r=999;pk=:dHJpYWwxMjEzMjM=:"#;
        assert_eq!(standings(key), some(&["default"]));
        assert_eq!(standings(r#""a";r=1;r=2"#), some(&["a"]));
        assert_eq!(standings(r#""a";r=x;r=2"#), some(&["a"]), "the last counts");
        assert_eq!(standings(r#""a";r=999999999999999"#), some(&["a"]));
        assert_eq!(standings(r#""a\"b";r=1"#), some(&["a\"b"]));
        assert_eq!(standings("\"a\";r=1\t,\t\"b\";r=2"), some(&["a", "b"]));
        let two_lines = [r#""a";r=1"#, r#""b";r=2"#];
        assert_eq!(read(ListField::Standings, &two_lines), some(&["a", "b"]));
        let unknown = r#""a";r=1;x-note=%"f%c3%bc";at=@1;ok=?1;d=-1.5;tok=*a/b"#;
        assert_eq!(standings(unknown), some(&["a"]));
        assert_eq!(standings(""), some(&[]));
    }

    #[test]
    fn what_another_draft_or_a_slip_wrote_is_not() {
        for line in [
            r#""a" ;r=1"#,
            r#""a";t=5"#,
            r#""a";r=-1"#,
            r#""a";r=1.5"#,
            r#""a";r="5""#,
            r#""a";r"#,
            r#""a";R=1"#,
            r#""a";r=1,"#,
            r#""a";r=1000000000000000"#,
            r#""café";r=1"#,
            r#""a;r=1"#,
            r#""a\n";r=1"#,
            r#""a";r=1 "b";r=2"#,
            r#"("a");r=1"#,
            r#"42;r=1"#,
            r#""a";r=1;pk="x""#,
            r#""a";r=1;t=-5"#,
            "limit=100, remaining=45, reset=30",
            r#""api";a=99;w=60;pk=:R0VUH2FsaWNl:"#,
        ] {
            assert_eq!(standings(line), None, "{line}");
        }
        for line in [
            r#""x";q=100;w=0"#,
            "100;w=60;burst=20",
            r#""x";w=60"#,
            r#""x";q=1;qu=requests"#,
        ] {
            assert_eq!(policies(line), None, "{line}");
        }
    }
}
