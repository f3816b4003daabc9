//! Recently verified tokens, by a keyed hash of their text.
//!
//! Each worker has its own cache, so nothing is locked or shared. The token text is not stored. A
//! token is recognised by a 128-bit HighwayHash under a secret that never leaves the process. A
//! forgery would have to match one of these values without seeing them: 2¹²⁸ guesses divided by the
//! number of cached tokens. SipHash-1-3 is as strong, but takes 200 ns for the 673 bytes of an
//! RSA-signed token. That is most of the lookup time.
//!
//! An entry ends when the token expires, its key set is replaced, or another token needs its slot.
//! Only tokens with a valid signature are cached, so forged ones cannot evict them.

use std::{cell::RefCell, fmt, rc::Rc};

use highway::{HighwayHash as _, HighwayHasher, Key};

use super::claims::Verified;

/// Set-associative table: `PLACES` sets of `WAYS` tokens each.
const WAYS: usize = 4;
const PLACES: usize = 2048;

/// The verified tokens of one worker: at most 8192, some hundred bytes each. Allocated when the
/// first token is verified.
pub struct TokenCache {
    secret: Key,
    entries: RefCell<Vec<Option<CachedToken>>>,
}

struct CachedToken {
    key: u128,
    generation: u64,
    /// Seconds since 1970.
    until: f64,
    token: Rc<Verified>,
}

impl TokenCache {
    /// An empty cache; `secret` must be random.
    pub fn new(secret: [u8; 32]) -> TokenCache {
        TokenCache {
            secret: key_of(secret),
            entries: RefCell::default(),
        }
    }

    /// The cache key of a token. `source` separates user sources, which verify differently.
    pub(super) fn key(&self, source: usize, token: &[u8]) -> u128 {
        let [low, high] = HighwayHasher::new(self.secret).hash128(token);
        // added, not hashed: a token has different keys under two sources
        (u128::from(high) << 64 | u128::from(low)).wrapping_add(source as u128)
    }

    /// The token, if it was verified with this key set and has not expired.
    pub(super) fn find(&self, key: u128, generation: u64, now: f64) -> Option<Rc<Verified>> {
        let entries = self.entries.borrow();
        let mut ways = entries.get(ways(key))?.iter().flatten();
        let entry = ways.find(|entry| entry.key == key)?;
        (entry.generation == generation && now < entry.until).then(|| Rc::clone(&entry.token))
    }

    /// Caches a token until it expires.
    pub(super) fn keep(
        &self,
        key: u128,
        generation: u64,
        until: f64,
        now: f64,
        token: &Rc<Verified>,
    ) {
        let mut entries = self.entries.borrow_mut();
        if entries.is_empty() {
            entries.resize_with(PLACES * WAYS, || None);
        }
        let ways = &mut entries[ways(key)];
        let is_free = |entry: &Option<CachedToken>| {
            entry
                .as_ref()
                .is_none_or(|entry| entry.key == key || entry.until <= now)
        };
        // if none is free, the key's own bits choose a random one
        let way = ways.iter().position(is_free);
        let way = way.unwrap_or((key >> 64) as usize % WAYS);
        ways[way] = Some(CachedToken {
            key,
            generation,
            until,
            token: Rc::clone(token),
        });
    }
}

/// Shows only the number of tokens.
impl fmt::Debug for TokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.entries.borrow().iter().flatten().count();
        write!(f, "TokenCache({held})")
    }
}

fn key_of(secret: [u8; 32]) -> Key {
    let (words, _) = secret.as_chunks();
    Key(std::array::from_fn(|at| u64::from_le_bytes(words[at])))
}

fn ways(key: u128) -> std::ops::Range<usize> {
    let first = (key as usize % PLACES) * WAYS;
    first..first + WAYS
}

#[cfg(test)]
mod tests {
    use super::{super::ClaimRules, *};

    fn token(user: &str) -> Rc<Verified> {
        let rules = ClaimRules {
            user: "sub".to_owned(),
            ..ClaimRules::default()
        };
        let payload = format!(r#"{{"sub":"{user}","exp":1}}"#);
        let (token, _) = rules.read(payload.as_bytes(), 0.0).expect("valid claims");
        Rc::new(token)
    }

    #[test]
    fn a_token_is_known_until_it_expires_or_its_keys_are_replaced() {
        let cache = TokenCache::new([1; 32]);
        let key = cache.key(0, b"token");
        assert_eq!(cache.find(key, 1, 0.0), None);
        cache.keep(key, 1, 10.0, 0.0, &token("alice"));
        assert_eq!(cache.find(key, 1, 9.9), Some(token("alice")));
        assert_eq!(cache.find(key, 1, 10.0), None, "expired");
        assert_eq!(cache.find(key, 2, 0.0), None, "other keys");
        assert_eq!(
            cache.find(cache.key(1, b"token"), 1, 0.0),
            None,
            "another source"
        );
        assert_eq!(
            cache.find(cache.key(0, b"tokem"), 1, 0.0),
            None,
            "another token"
        );
        cache.keep(key, 2, 20.0, 10.0, &token("bob"));
        assert_eq!(cache.find(key, 2, 10.0), Some(token("bob")));
    }

    #[test]
    fn room_is_bounded_and_what_expired_gives_way_first() {
        let cache = TokenCache::new([1; 32]);
        // all in one set of the table
        let key = |number: usize| (number as u128) << 64;
        for number in 0..WAYS {
            cache.keep(
                key(number),
                1,
                if number == 2 { 5.0 } else { 100.0 },
                0.0,
                &token("a"),
            );
        }
        cache.keep(key(WAYS), 1, 100.0, 6.0, &token("b"));
        let held = |range: std::ops::Range<usize>| {
            range
                .filter(|number| cache.find(key(*number), 1, 6.0).is_some())
                .count()
        };
        assert_eq!(held(0..WAYS + 1), WAYS);
        assert!(cache.find(key(2), 1, 0.0).is_none());
        for number in 0..1000 {
            cache.keep(key(number), 1, 100.0, 6.0, &token("c"));
        }
        assert_eq!(held(0..1000), WAYS);
        assert_eq!(format!("{cache:?}"), "TokenCache(4)");
    }

    #[test]
    fn without_the_secret_nobody_knows_the_key() {
        let one = TokenCache::new([1; 32]).key(0, b"token");
        assert_ne!(one, TokenCache::new([2; 32]).key(0, b"token"));
    }
}
