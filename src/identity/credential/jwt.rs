//! JSON Web Tokens (RFC 7519) in a header, verified with keys that the configuration names (RFC 8725 throughout).
//!
//! ```text
//! text ─▶ remembered? ─▶ well-formed? ─▶ which key? ─▶ signature ─▶ claims ─▶ remember
//!          cache          token           keys          keys         claims
//! ```
//!
//! Nothing that a token says is believed before its signature is verified, and its payload is not even decoded. Verifying takes
//! some tens of microseconds and some allocations; a remembered token takes neither.

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

pub use cache::TokenCache;
pub use claims::{ClaimRules, Verified};
pub use jsonwebtoken::Algorithm;
pub use keys::{ALGORITHMS, KeyError, KeyRing, KeySet, KeySource, KeysUrl, in_short};

use super::super::OnInvalid;
use super::{Fault, User, secret_in};
use token::Token;

/// Where `[[user]] from = "jwt"` finds tokens, and what it asks of them.
#[derive(Clone, Debug)]
pub struct TokenSource {
    /// The header that carries the token; in `Authorization` it stands behind `Bearer`.
    pub header: HeaderName,
    /// What tokens are verified with.
    pub keys: KeySource,
    /// What they must say.
    pub claims: ClaimRules,
    /// What a token that does not verify means.
    pub invalid: OnInvalid,
}

/// Where one request keeps its token while it is under way: a [`Client`](crate::identity::Client) borrows from it.
pub type HeldToken = OnceCell<Rc<Verified>>;

/// What a worker gives for a request's token: what it remembers, and a place for what it finds.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Tokens that this worker has verified.
    pub cache: &'a TokenCache,
    /// Empty, and this request's own.
    pub held: &'a HeldToken,
    /// The wall clock; asked only where there is a token.
    pub now: fn() -> SystemTime,
}

/// A [`TokenSource`], ready to be asked.
#[derive(Debug)]
pub(in crate::identity) struct Jwt {
    header: HeaderName,
    claims: ClaimRules,
    pub(in crate::identity) invalid: OnInvalid,
    pub(in crate::identity) keys: Arc<KeyRing>,
    /// Where the keys come from, if they are fetched.
    pub(in crate::identity) url: Option<KeysUrl>,
    /// Its place among the sources.
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

    /// The user of the token that the request carries; `None` when it carries none.
    pub(in crate::identity) fn user<'a>(
        &self,
        headers: &HeaderMap,
        tokens: Tokens<'a>,
    ) -> Result<Option<User<'a>>, Fault> {
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
    ) -> Result<Rc<Verified>, Fault> {
        let token = Token::parse(text)?;
        let generation = self.keys.verify(&token)?;
        let (verified, until) = self.claims.read(&token.payload()?, now)?;
        let verified = Rc::new(verified);
        cache.keep(key, generation, until, now, &verified);
        Ok(verified)
    }
}
