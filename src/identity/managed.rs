//! Header fields that only tidegate and trusted proxies may set, in every spelling that an upstream
//! may accept.
//!
//! Servers with CGI-like variables (RFC 3875 §4.1.18) map `X-User-Id`, `X_User_Id` and sometimes
//! `X.User.Id` to one name. A client could send a variant that is not removed. So drop the fields
//! that [`ManagedFields::contains`] from untrusted peers, and every [`ManagedFields::alias`] from
//! any peer.
//!
//! The header of a credential belongs to the client, so it passes. Its other spellings do not: the
//! gateway does not check them, but the upstream may.

use super::{
    address::AddressSource,
    settings::{IdentitySettings, UserSource},
};

/// Fields that tidegate sends to the upstream or reads from trusted proxies in every configuration.
const ALWAYS: [&str; 7] = [
    "forwarded",
    "x-real-ip",
    "x-request-id",
    "x-user-id",
    "x-rate-limit-tier",
    "x-request-priority",
    "x-ratelimit-over",
];

/// Every name with this prefix is managed.
const FAMILY: &str = "x-forwarded-";

/// The names of all managed fields.
#[derive(Clone, Debug)]
pub struct ManagedFields {
    /// As configured, in lower case.
    names: Vec<Box<str>>,
    /// Headers in which clients send credentials: not managed, but their other spellings are.
    credentials: Vec<Box<str>>,
    /// Bit n is set if some name has n bytes. This alone excludes nearly every other name.
    lengths: u64,
    source: AddressSource,
}

impl ManagedFields {
    /// Collects the fixed names and the configured names for addresses, users and tiers.
    pub fn new(settings: &IdentitySettings) -> ManagedFields {
        let mut names: Vec<Box<str>> = ALWAYS.map(Box::from).into();
        let mut credentials: Vec<Box<str>> = Vec::new();
        if let AddressSource::Single(name) = &settings.address_from {
            names.push(name.as_str().into());
        }
        for source in &settings.users {
            match source {
                UserSource::Header {
                    header,
                    tier_header,
                } => {
                    names.push(header.as_str().into());
                    names.extend(tier_header.as_ref().map(|header| header.as_str().into()));
                }
                UserSource::ApiKey { header, .. } => credentials.push(header.as_str().into()),
                UserSource::Jwt(source) => credentials.push(source.header.as_str().into()),
                UserSource::ClientCert(_) => {}
            }
        }
        for list in [&mut names, &mut credentials] {
            list.sort_unstable();
            list.dedup();
        }
        let lengths = names
            .iter()
            .chain(&credentials)
            .fold(0, |lengths, name| lengths | length_bit(name));
        ManagedFields {
            names,
            credentials,
            lengths,
            source: settings.address_from.clone(),
        }
    }

    /// The header in which trusted proxies send addresses; the only such list to forward.
    pub fn source(&self) -> &AddressSource {
        &self.source
    }

    /// Whether a field name, in any case, is managed, or resembles a managed name or the header of
    /// a credential. Takes a few nanoseconds for most other names.
    pub fn contains(&self, name: &str) -> bool {
        in_family(name)
            || (self.may_be_known(name)
                && (look_alikes(&self.names, name).next().is_some()
                    || self.is_other_spelling(name)))
    }

    /// Whether a field name resembles a managed name or the header of a credential but differs by
    /// more than case. No legitimate sender uses such a name.
    pub fn alias(&self, name: &str) -> bool {
        if in_family(name) {
            return name.contains(['_', '.']);
        }
        self.may_be_known(name) && self.is_other_spelling(name)
    }

    /// Whether a field may not be in trailers: it is managed or carries a credential, in any
    /// spelling. Servers that merge trailers into the headers would take it for a checked field.
    pub fn forbids_trailer(&self, name: &str) -> bool {
        self.contains(name) || look_alikes(&self.credentials, name).next().is_some()
    }

    fn may_be_known(&self, name: &str) -> bool {
        self.lengths & length_bit(name) != 0
    }

    fn is_other_spelling(&self, name: &str) -> bool {
        let mut resembles = false;
        for known in look_alikes(&self.names, name).chain(look_alikes(&self.credentials, name)) {
            if known.eq_ignore_ascii_case(name) {
                return false;
            }
            resembles = true;
        }
        resembles
    }
}

fn look_alikes<'a>(names: &'a [Box<str>], name: &'a str) -> impl Iterator<Item = &'a str> {
    names
        .iter()
        .map(|known| &**known)
        .filter(move |known| known.len() == name.len() && look_alike(known, name))
}

fn in_family(name: &str) -> bool {
    // `get` returns `None` for a shorter name or a non-ASCII letter across the end
    matches!(name.as_bytes().first(), Some(b'x' | b'X'))
        && name
            .get(..FAMILY.len())
            .is_some_and(|start| look_alike(FAMILY, start))
}

fn length_bit(name: &str) -> u64 {
    1 << name.len().min(63)
}

/// Whether two names of equal length are equal when case, `_` and `.` are ignored.
fn look_alike(one: &str, other: &str) -> bool {
    let folded = |byte: u8| {
        if matches!(byte, b'_' | b'.') {
            b'-'
        } else {
            byte.to_ascii_lowercase()
        }
    };
    one.bytes().map(folded).eq(other.bytes().map(folded))
}

#[cfg(test)]
mod tests {
    use http::HeaderName;
    use proptest::prelude::*;

    use super::{
        super::{KnownKeys, OnInvalid},
        *,
    };

    fn managed() -> ManagedFields {
        ManagedFields::new(&IdentitySettings {
            address_from: AddressSource::Single(HeaderName::from_static("cf-connecting-ip")),
            users: vec![UserSource::Header {
                header: HeaderName::from_static("x_auth_user"),
                tier_header: Some(HeaderName::from_static("x-user-tier")),
            }],
            ..IdentitySettings::default()
        })
    }

    #[test]
    fn managed_name_is_known_in_every_spelling() {
        let managed = managed();
        for (name, alias) in [
            ("x-forwarded-for", false),
            ("X-Forwarded-Host", false),
            ("x-forwarded-anything", false),
            ("Forwarded", false),
            ("x-real-ip", false),
            ("x-request-id", false),
            ("x-user-id", false),
            ("x-rate-limit-tier", false),
            ("x-request-priority", false),
            ("x-ratelimit-over", false),
            ("X_RateLimit_Over", true),
            ("X.RateLimit.Over", true),
            ("cf-connecting-ip", false),
            ("x-user-tier", false),
            ("x_auth_user", false),
            ("x-auth-user", true),
            ("x_forwarded_for", true),
            ("X.Forwarded.For", true),
            ("x-forwarded_for", true),
            ("x-forwarded-client_cert", true),
            ("x.User-Id", true),
            ("CF_Connecting.IP", true),
        ] {
            assert!(managed.contains(name), "{name}");
            assert_eq!(managed.alias(name), alias, "{name}");
        }
    }

    #[test]
    fn credential_passes_in_its_own_spelling_only() {
        let managed = ManagedFields::new(&IdentitySettings {
            users: vec![UserSource::ApiKey {
                header: HeaderName::from_static("x-api-key"),
                keys: KnownKeys::new(Vec::new()),
                invalid: OnInvalid::Reject,
            }],
            ..IdentitySettings::default()
        });
        assert!(!managed.contains("X-Api-Key") && !managed.alias("X-Api-Key"));
        assert!(managed.forbids_trailer("X-Api-Key"));
        for name in ["x_api_key", "X.Api.Key", "x-api_key"] {
            assert!(managed.contains(name) && managed.alias(name), "{name}");
            assert!(managed.forbids_trailer(name), "{name}");
        }
        assert!(!managed.forbids_trailer("x-api-keys"));
    }

    #[test]
    fn other_names_are_left_alone() {
        let managed = managed();
        for name in [
            "",
            "x",
            "host",
            "accept",
            "x-forwarded",
            "xforwarded-for",
            "x-user-ids",
            "x+user+id",
            "true-client-ip",
            "é-forwarded-for",
        ] {
            assert!(!managed.contains(name) && !managed.alias(name), "{name}");
        }
    }

    #[test]
    fn two_configured_spellings_are_both_names() {
        let header = |name| UserSource::Header {
            header: HeaderName::from_static(name),
            tier_header: None,
        };
        let managed = ManagedFields::new(&IdentitySettings {
            users: vec![header("a-b"), header("a_b")],
            ..IdentitySettings::default()
        });
        assert!(!managed.alias("a-b") && !managed.alias("A_B") && managed.alias("a.b"));
    }

    proptest! {
        #[test]
        fn no_name_panics_and_every_alias_is_managed(name in "\\PC{0,20}") {
            let managed = managed();
            prop_assert!(!managed.alias(&name) || managed.contains(&name));
        }
    }
}
