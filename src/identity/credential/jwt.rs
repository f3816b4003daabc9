//! JSON Web Tokens (RFC 7519) in a header, verified with configured keys as RFC 8725 recommends.
//!
//! ```text
//! text ─▶ remembered? ─▶ well-formed? ─▶ which key? ─▶ signature ─▶ claims ─▶ remember
//!          cache          token           keys          keys         claims
//! ```
//!
//! Nothing in a token is trusted before its signature verifies; even the payload is decoded only
//! then. Verification takes tens of microseconds and allocates. A cached token needs neither.

mod algorithms;
mod cache;
mod claims;
mod json;
mod keys;
mod token;

use std::{
    cell::OnceCell,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderName};

pub use algorithms::ALGORITHMS;
pub use cache::TokenCache;
pub use claims::{ClaimRules, Verified};
pub use jsonwebtoken::Algorithm;
pub use keys::{KeyError, KeyRing, KeySet, KeySource, KeysUrl, in_short};

use super::{fault::CredentialFault, kind::OnInvalid, user::User, value::secret_in};
use token::Token;

/// Settings of `[[user]] from = "jwt"`: where tokens are, and what they must contain.
#[derive(Clone, Debug)]
pub struct TokenSource {
    /// The header that carries the token. In `Authorization` the token follows `Bearer`.
    pub header: HeaderName,
    /// The keys that verify tokens.
    pub keys: KeySource,
    /// The claims that tokens must have.
    pub claims: ClaimRules,
    /// How to treat a token that does not verify.
    pub invalid: OnInvalid,
}

/// Holds a request's token while the request is in flight. A [`Client`](crate::identity::Client)
/// borrows from it.
pub type HeldToken = OnceCell<Rc<Verified>>;

/// A worker's token cache and one request's token slot.
#[derive(Clone, Copy, Debug)]
pub struct TokenWorkspace<'a> {
    /// Tokens that this worker has already verified.
    pub cache: &'a TokenCache,
    /// The request's own slot, initially empty.
    pub held: &'a HeldToken,
    /// The wall clock, read only if the request has a token.
    pub now: fn() -> SystemTime,
}

/// A [`TokenSource`] compiled for lookup.
#[derive(Debug)]
pub(in crate::identity) struct Jwt {
    header: HeaderName,
    claims: ClaimRules,
    pub(in crate::identity) invalid: OnInvalid,
    pub(in crate::identity) keys: Arc<KeyRing>,
    /// The URL of the keys, if they are fetched.
    pub(in crate::identity) url: Option<KeysUrl>,
    /// Index among the user sources.
    place: usize,
}

impl Jwt {
    pub(in crate::identity) fn new(source: &TokenSource, place: usize) -> Jwt {
        let (set, url) = match &source.keys {
            KeySource::Fixed(set) => (Arc::clone(set), None),
            KeySource::Url(url) => (Arc::default(), Some(url.clone())),
        };
        Jwt {
            header: source.header.clone(),
            claims: source.claims.clone(),
            invalid: source.invalid,
            keys: Arc::new(KeyRing::new(set)),
            url,
            place,
        }
    }

    /// The user of the request's token; `None` if it carries no token.
    pub(in crate::identity) fn user<'a>(
        &self,
        headers: &HeaderMap,
        tokens: TokenWorkspace<'a>,
    ) -> Result<Option<User<'a>>, CredentialFault> {
        let Some(text) = secret_in(headers, &self.header)? else {
            return Ok(None);
        };
        let now = (tokens.now)()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_secs_f64();
        let key = tokens.cache.key(self.place, text);
        let verified = match tokens.cache.find(key, self.keys.generation(), now) {
            Some(verified) => verified,
            None => self.verify(text, key, now, tokens.cache)?,
        };
        let verified = tokens.held.get_or_init(|| verified);
        Ok(Some(User {
            name: &verified.user,
            tier: verified.tier.as_deref(),
            tenant: verified.tenant.as_deref(),
            token: Some(verified),
        }))
    }

    fn verify(
        &self,
        text: &[u8],
        key: u128,
        now: f64,
        cache: &TokenCache,
    ) -> Result<Rc<Verified>, CredentialFault> {
        let token = Token::parse(text)?;
        let generation = self.keys.verify(&token)?;
        let (verified, until) = self.claims.read(&token.payload()?, now)?;
        let verified = Rc::new(verified);
        cache.keep(key, generation, until, now, &verified);
        Ok(verified)
    }
}
