//! The user that an authenticating proxy in front names in a header.
//!
//! The caller ensures that the peer is a trusted proxy. A repeated field is a fault, because the
//! proxy may have added its line beside one from the client. So is a value that cannot be a name.
//! Continuing without a user is no option: a client could escape its per-user limits by adding a
//! second line. An empty field means that nobody is signed in, as many proxies write it.

use http::{HeaderMap, HeaderName};

use super::{
    fault::CredentialFault,
    user::User,
    value::{NAME_MAX_BYTES, one_value},
};

/// The headers in which the proxy names the user and the tier.
#[derive(Debug)]
pub(in crate::identity) struct UserHeader {
    pub(in crate::identity) user: HeaderName,
    pub(in crate::identity) tier: Option<HeaderName>,
}

impl UserHeader {
    /// The user that the request names; `None` if it names none.
    pub(in crate::identity) fn user<'a>(
        &self,
        headers: &'a HeaderMap,
    ) -> Result<Option<User<'a>>, CredentialFault> {
        let Some(name) = name_in(headers, &self.user)? else {
            return Ok(None);
        };
        let tier = match &self.tier {
            Some(header) => name_in(headers, header)?,
            None => None,
        };
        Ok(Some(User {
            name,
            tier,
            tenant: None,
            token: None,
        }))
    }
}

/// The name in a field: at most [`NAME_MAX_BYTES`] of UTF-8 without control characters. `None` if
/// the field is absent or empty.
fn name_in<'a>(
    headers: &'a HeaderMap,
    field: &HeaderName,
) -> Result<Option<&'a str>, CredentialFault> {
    let Some(value) = one_value(headers, field)? else {
        return Ok(None);
    };
    if value.len() > NAME_MAX_BYTES {
        return Err(CredentialFault::Malformed);
    }
    let name = str::from_utf8(value)
        .map_err(|_| CredentialFault::Malformed)?
        .trim();
    if name.chars().any(char::is_control) {
        return Err(CredentialFault::Malformed);
    }
    Ok(Some(name).filter(|name| !name.is_empty()))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn user(lines: &[(&str, &[u8])]) -> Result<Option<(String, Option<String>)>, CredentialFault> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_bytes(value).expect("no controls"));
        }
        let source = UserHeader {
            user: HeaderName::from_static("x-user"),
            tier: Some(HeaderName::from_static("x-tier")),
        };
        Ok(source
            .user(&headers)?
            .map(|user| (user.name.to_owned(), user.tier.map(str::to_owned))))
    }

    #[test]
    fn header_names_user_and_tier() {
        let alice = |tier: Option<&str>| Ok(Some(("alice".to_owned(), tier.map(str::to_owned))));
        assert_eq!(
            user(&[("x-user", b" alice\t"), ("x-tier", b"pro")]),
            alice(Some("pro"))
        );
        assert_eq!(user(&[("x-user", b"alice")]), alice(None));
        assert_eq!(user(&[("x-user", b"alice"), ("x-tier", b"")]), alice(None));
        assert_eq!(
            user(&[("x-user", "Zoë".as_bytes())]),
            Ok(Some(("Zoë".to_owned(), None)))
        );
    }

    #[test]
    fn absent_or_empty_user_is_nobody() {
        for lines in [
            vec![],
            vec![("x-user", b" ".as_slice())],
            vec![("x-tier", b"pro".as_slice())],
        ] {
            assert_eq!(user(&lines), Ok(None));
        }
    }

    #[test]
    fn ambiguous_or_unreadable_name_is_a_fault() {
        let long = [b'a'; NAME_MAX_BYTES + 1];
        for (lines, fault) in [
            (
                vec![("x-user", b"alice".as_slice()), ("x-user", b"alice")],
                CredentialFault::Repeated,
            ),
            (
                vec![("x-user", b"alice"), ("x-user", b"")],
                CredentialFault::Repeated,
            ),
            (
                vec![
                    ("x-user", b"alice"),
                    ("x-tier", b"pro"),
                    ("x-tier", b"free"),
                ],
                CredentialFault::Repeated,
            ),
            (
                vec![("x-user", long.as_slice())],
                CredentialFault::Malformed,
            ),
            (vec![("x-user", b"\xff")], CredentialFault::Malformed),
            (vec![("x-user", b"a\tb")], CredentialFault::Malformed),
            (vec![("x-user", b"a\xc2\x85b")], CredentialFault::Malformed),
        ] {
            assert_eq!(user(&lines), Err(fault), "{lines:?}");
        }
    }
}
