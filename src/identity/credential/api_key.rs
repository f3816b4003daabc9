//! API keys: a secret in a header, stored only as a SHA-256 digest.
//!
//! The secret is hashed before any comparison, so lookup time reveals nothing about it. Controlling
//! the digest would require inverting SHA-256. The final comparison takes constant time
//! nevertheless. A slow password hash would add nothing for keys of 128 random bits, and would let
//! clients exhaust the CPU.

use std::{collections::HashMap, ops::Deref, sync::Arc};

use http::{HeaderMap, HeaderName, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{
    fault::CredentialFault,
    kind::{Credential, OnInvalid},
    user::User,
    value::secret_in,
};

/// Longer keys are rejected before hashing.
const KEY_MAX_BYTES: usize = 1024;

/// One entry of a keys file.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// SHA-256 digest of the secret. The secret itself is never stored.
    pub sha256: [u8; 32],
    /// The user that the key identifies.
    pub user: String,
    /// The user's tier.
    pub tier: Option<String>,
    /// The user's tenant.
    pub tenant: Option<String>,
}

/// The entries of a keys file, indexed by digest. Clones share one index.
#[derive(Clone, Debug)]
pub struct KnownKeys(Arc<Indexed>);

#[derive(Debug)]
struct Indexed {
    /// Sorted by digest.
    keys: Vec<ApiKey>,
    /// Maps the first eight bytes of a digest to the first key that has them.
    by_prefix: HashMap<u64, usize>,
}

impl KnownKeys {
    /// Indexes the keys. If two have the same digest, the first wins. 100,000 keys take tens of
    /// milliseconds.
    pub fn new(mut keys: Vec<ApiKey>) -> KnownKeys {
        keys.sort_by_key(|key| key.sha256);
        keys.dedup_by_key(|key| key.sha256);
        let mut by_prefix = HashMap::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            by_prefix.entry(prefix(&key.sha256)).or_insert(at);
        }
        KnownKeys(Arc::new(Indexed { keys, by_prefix }))
    }

    fn find(&self, digest: &[u8; 32]) -> Option<&ApiKey> {
        let Indexed { keys, by_prefix } = &*self.0;
        let first = *by_prefix.get(&prefix(digest))?;
        let same_prefix = keys[first..]
            .iter()
            .take_while(|key| prefix(&key.sha256) == prefix(digest));
        same_prefix
            .into_iter()
            .find(|key| bool::from(key.sha256.ct_eq(digest)))
    }
}

impl Deref for KnownKeys {
    type Target = [ApiKey];

    fn deref(&self) -> &[ApiKey] {
        &self.0.keys
    }
}

/// The accepted keys of one header.
#[derive(Debug)]
pub(in crate::identity) struct ApiKeys {
    pub(in crate::identity) header: HeaderName,
    pub(in crate::identity) invalid: OnInvalid,
    pub(in crate::identity) keys: KnownKeys,
}

impl ApiKeys {
    /// The user of the request's key; `None` if it carries no key.
    pub(in crate::identity) fn user(
        &self,
        headers: &HeaderMap,
    ) -> Result<Option<User<'_>>, CredentialFault> {
        let Some(secret) = secret_in(headers, &self.header)? else {
            return Ok(None);
        };
        if secret.is_empty() || secret.len() > KEY_MAX_BYTES {
            return Err(CredentialFault::Malformed);
        }
        let key = self
            .keys
            .find(&Sha256::digest(secret).into())
            .ok_or(CredentialFault::Unknown)?;
        Ok(Some(User {
            name: &key.user,
            tier: key.tier.as_deref(),
            tenant: key.tenant.as_deref(),
            token: None,
        }))
    }

    /// The kind of credential, by where the key is sent.
    pub(in crate::identity) fn credential(&self) -> Credential {
        match self.header == AUTHORIZATION {
            true => Credential::Bearer,
            false => Credential::ApiKey,
        }
    }
}

fn prefix(digest: &[u8; 32]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn key(secret: &str, user: &str) -> ApiKey {
        ApiKey {
            sha256: Sha256::digest(secret).into(),
            user: user.to_owned(),
            tier: Some("pro".to_owned()),
            tenant: None,
        }
    }

    fn keys(header: HeaderName) -> ApiKeys {
        ApiKeys {
            header,
            invalid: OnInvalid::Reject,
            keys: KnownKeys::new(vec![
                key("alpha", "alice"),
                key("beta", "bob"),
                key("alpha", "not alice"),
            ]),
        }
    }

    fn user(header: &HeaderName, lines: &[&[u8]]) -> Result<Option<String>, CredentialFault> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header, HeaderValue::from_bytes(line).expect("no controls"));
        }
        Ok(keys(header.clone())
            .user(&headers)?
            .map(|user| user.name.to_owned()))
    }

    #[test]
    fn known_key_stands_for_its_user() {
        let header = HeaderName::from_static("x-api-key");
        assert_eq!(user(&header, &[b"alpha"]), Ok(Some("alice".to_owned())));
        assert_eq!(user(&header, &[b" \tbeta "]), Ok(Some("bob".to_owned())));
        assert_eq!(user(&header, &[]), Ok(None));
    }

    #[test]
    fn any_other_key_is_a_fault() {
        let header = HeaderName::from_static("x-api-key");
        for (lines, fault) in [
            (vec![b"gamma".as_slice()], CredentialFault::Unknown),
            (vec![b"Alpha"], CredentialFault::Unknown),
            (vec![b"alpha, alpha"], CredentialFault::Unknown),
            (vec![b"\xff"], CredentialFault::Unknown),
            (vec![b""], CredentialFault::Malformed),
            (vec![b" "], CredentialFault::Malformed),
            (vec![&[b'a'; KEY_MAX_BYTES + 1]], CredentialFault::Malformed),
            (vec![b"alpha", b"alpha"], CredentialFault::Repeated),
            (vec![b"alpha", b""], CredentialFault::Repeated),
        ] {
            assert_eq!(user(&header, &lines), Err(fault), "{lines:?}");
        }
    }

    #[test]
    fn authorization_carries_a_key_behind_bearer_only() {
        for (line, expected) in [
            (b"Bearer alpha".as_slice(), Ok(Some("alice".to_owned()))),
            (b"bEARER   alpha", Ok(Some("alice".to_owned()))),
            (b"Basic alpha", Ok(None)),
            (b"Bearerx", Ok(None)),
            (b"alpha", Ok(None)),
            (b"Bearer", Err(CredentialFault::Malformed)),
            (b"Bearer gamma", Err(CredentialFault::Unknown)),
        ] {
            assert_eq!(
                user(&AUTHORIZATION, &[line]),
                expected,
                "{}",
                line.escape_ascii()
            );
        }
    }

    #[test]
    fn digests_that_begin_alike_are_told_apart() {
        let digest = |last: u8| {
            let mut digest = [7; 32];
            digest[31] = last;
            digest
        };
        let key = |last| ApiKey {
            sha256: digest(last),
            user: last.to_string(),
            tier: None,
            tenant: None,
        };
        let keys = KnownKeys::new(vec![key(3), key(1), key(2)]);
        for last in 1..=3 {
            assert_eq!(
                keys.find(&digest(last)).map(|key| key.user.clone()),
                Some(last.to_string())
            );
        }
        assert!(keys.find(&digest(4)).is_none());
    }
}
