//! Header fields that only tidegate and trusted proxies may set, in every spelling that an upstream
//! may accept.
//!
//! Servers with CGI-like variables (RFC 3875 §4.1.18) map `X-User-Id`, `X_User_Id` and sometimes
//! `X.User.Id` to one name. A client could send a variant that is not removed. So drop the fields
//! that [`ManagedFields::contains`] from untrusted peers, and every [`ManagedFields::alias`] from
//! any peer.

use super::{AddressSource, IdentitySettings, UserSource};

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
    /// Bit n is set if some name has n bytes. This alone excludes nearly every other name.
    lengths: u64,
    source: AddressSource,
}

impl ManagedFields {
    /// Collects the fixed names and the configured names for addresses, users and tiers.
    pub fn new(settings: &IdentitySettings) -> ManagedFields {
        let mut names: Vec<Box<str>> = ALWAYS.map(Box::from).into();
        if let AddressSource::Single(name) = &settings.address_from {
            names.push(name.as_str().into());
        }
        for source in &settings.users {
            if let UserSource::Header {
                header,
                tier_header,
            } = source
            {
                names.push(header.as_str().into());
                names.extend(tier_header.as_ref().map(|header| header.as_str().into()));
            }
        }
        names.sort_unstable();
        names.dedup();
        let lengths = names
            .iter()
            .fold(0, |lengths, name| lengths | length_bit(name));
        ManagedFields {
            names,
            lengths,
            source: settings.address_from.clone(),
        }
    }

    /// The header in which trusted proxies send addresses; the only such list to forward.
    pub fn source(&self) -> &AddressSource {
        &self.source
    }

    /// Whether a field name, in any case, is managed or resembles a managed name. Takes a few
    /// nanoseconds for most other names.
    pub fn contains(&self, name: &str) -> bool {
        in_family(name) || self.look_alikes(name).next().is_some()
    }

    /// Whether a field name resembles a managed name but differs by more than case. No legitimate
    /// sender uses such a name.
    pub fn alias(&self, name: &str) -> bool {
        if in_family(name) {
            return name.contains(['_', '.']);
        }
        let mut is_alias = false;
        for managed in self.look_alikes(name) {
            if managed.eq_ignore_ascii_case(name) {
                return false;
            }
            is_alias = true;
        }
        is_alias
    }

    fn look_alikes(&self, name: &str) -> impl Iterator<Item = &str> {
        let worth_a_look = self.lengths & length_bit(name) != 0;
        let names = if worth_a_look {
            self.names.as_slice()
        } else {
            &[]
        };
        names
            .iter()
            .map(|managed| &**managed)
            .filter(move |managed| managed.len() == name.len() && look_alike(managed, name))
    }
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

    use super::*;

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
