//! Claims of a verified token: whether it is for us and valid now.
//!
//! A claim of the wrong type is a fault, never an absent claim. Otherwise `"exp": "never"` would be
//! a token that never expires (CVE-2026-25537). Times are seconds since 1970, optionally with a
//! fraction (RFC 7519 §2):
//!
//! ```text
//!            nbf - leeway                      exp + leeway
//! ───────────────●━━━━━━━━━━━━━━ accepted ━━━━━━━━━━━━○────────────▶ now
//! ```

use std::time::Duration;

use serde_json::{Map, Value};

use super::{
    super::{fault::CredentialFault, value::NAME_MAX_BYTES},
    json,
};

/// The claims that a token must have, and those that are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimRules {
    /// The required `iss`.
    pub issuer: Option<String>,
    /// `aud` must be or contain one of these. Empty accepts any.
    pub audience: Vec<String>,
    /// Tolerated difference between the issuer's clock and ours.
    pub leeway: Duration,
    /// The claim that names the user.
    pub user: String,
    /// The claim that names the tier.
    pub tier: Option<String>,
    /// The claim that names the tenant.
    pub tenant: Option<String>,
    /// Other claims that limits use as keys.
    pub others: Vec<String>,
}

/// A claim that a limit uses as key: name, and value as text.
type KeyedClaim = (Box<str>, Box<str>);

/// The claims of a verified token, without its text.
#[derive(Debug, PartialEq, Eq)]
pub struct Verified {
    pub(super) user: Box<str>,
    pub(super) tier: Option<Box<str>>,
    pub(super) tenant: Option<Box<str>>,
    claims: Box<[KeyedClaim]>,
}

impl Verified {
    /// A claim as text, if a limit uses it as key.
    pub fn claim(&self, name: &str) -> Option<&str> {
        let mut claims = self.claims.iter();
        claims.find_map(|(known, value)| (**known == *name).then_some(&**value))
    }
}

/// 2⁵³: below it an `f64` represents every second.
const SECONDS_MAX: f64 = 9_007_199_254_740_992.0;

impl ClaimRules {
    /// Reads a verified payload and its expiry. Times are seconds since 1970.
    pub(super) fn read(
        &self,
        payload: &[u8],
        now: f64,
    ) -> Result<(Verified, f64), CredentialFault> {
        let claims = json::object(payload).ok_or(CredentialFault::Malformed)?;
        let leeway = self.leeway.as_secs_f64();
        let until = time(&claims, "exp")?.ok_or(CredentialFault::Claims)? + leeway;
        if now >= until {
            return Err(CredentialFault::Expired);
        }
        let from = time(&claims, "nbf")?.map_or(0.0, |from| from - leeway);
        if now < from || !self.is_for_us(&claims)? {
            return Err(CredentialFault::Claims);
        }
        let named = |name: &Option<String>| match name {
            Some(name) => text_of(find(&claims, name)),
            None => Ok(None),
        };
        let verified = Verified {
            user: text_of(find(&claims, &self.user))?.ok_or(CredentialFault::Claims)?,
            tier: named(&self.tier)?,
            tenant: named(&self.tenant)?,
            claims: self.others(&claims),
        };
        Ok((verified, until))
    }

    fn is_for_us(&self, claims: &Map<String, Value>) -> Result<bool, CredentialFault> {
        let issuer = match claims.get("iss") {
            None => None,
            Some(issuer) => Some(issuer.as_str().ok_or(CredentialFault::Malformed)?),
        };
        let audience: Vec<&str> = match claims.get("aud") {
            None => Vec::new(),
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(list)) => {
                let texts: Option<_> = list.iter().map(Value::as_str).collect();
                texts.ok_or(CredentialFault::Malformed)?
            }
            Some(_) => return Err(CredentialFault::Malformed),
        };
        let issuer_matches = self.issuer.is_none() || self.issuer.as_deref() == issuer;
        let mut ours = self.audience.iter();
        let audience_matches =
            self.audience.is_empty() || ours.any(|name| audience.contains(&&**name));
        Ok(issuer_matches && audience_matches)
    }

    /// A claim without a short text has no value; the limit's `missing` decides.
    fn others(&self, claims: &Map<String, Value>) -> Box<[KeyedClaim]> {
        let other = |name: &String| {
            let value = text_of(find(claims, name)).ok()??;
            Some((name.as_str().into(), value))
        };
        self.others.iter().filter_map(other).collect()
    }
}

/// Finds a claim by its exact name, otherwise by path: `a.b` is member `b` of object `a`.
fn find<'c>(claims: &'c Map<String, Value>, name: &str) -> Option<&'c Value> {
    if let Some(value) = claims.get(name) {
        return Some(value);
    }
    let (first, rest) = name.split_once('.')?;
    find(claims.get(first)?.as_object()?, rest)
}

/// A string, integer or boolean as trimmed text. White space is trimmed because a header field
/// cannot carry it, and the upstream must receive the value that is counted. Null and an empty
/// string are no value. A string with control characters is a fault.
fn text_of(value: Option<&Value>) -> Result<Option<Box<str>>, CredentialFault> {
    let text: Box<str> = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text.trim().into(),
        Some(Value::Number(number)) if !number.is_f64() => number.to_string().into(),
        Some(Value::Bool(value)) => value.to_string().into(),
        Some(Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            return Err(CredentialFault::Malformed);
        }
    };
    if text.len() > NAME_MAX_BYTES || text.chars().any(char::is_control) {
        return Err(CredentialFault::Malformed);
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn time(claims: &Map<String, Value>, name: &str) -> Result<Option<f64>, CredentialFault> {
    let Some(value) = claims.get(name) else {
        return Ok(None);
    };
    let seconds = value.as_f64().ok_or(CredentialFault::Malformed)?;
    match (0.0..SECONDS_MAX).contains(&seconds) {
        true => Ok(Some(seconds)),
        false => Err(CredentialFault::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> ClaimRules {
        ClaimRules {
            leeway: Duration::from_secs(60),
            user: "sub".to_owned(),
            tier: Some("plan".to_owned()),
            tenant: Some("org.id".to_owned()),
            others: vec!["device".to_owned(), "https://a.example/x".to_owned()],
            ..ClaimRules::default()
        }
    }

    fn read(payload: &str) -> Result<Verified, CredentialFault> {
        let read = rules().read(payload.as_bytes(), 1000.0);
        read.map(|(verified, _)| verified)
    }

    #[test]
    fn claims_name_user_tier_tenant_and_what_limits_ask_for() {
        let payload = r#"{"exp":2000,"sub":42,"plan":"pro","org":{"id":"acme"},"device":true,"https://a.example/x":"y","other":1}"#;
        let verified = read(payload).expect("valid claims");
        assert_eq!(&*verified.user, "42");
        assert_eq!(
            (verified.tier.as_deref(), verified.tenant.as_deref()),
            (Some("pro"), Some("acme"))
        );
        let claims = ["device", "https://a.example/x", "other"].map(|name| verified.claim(name));
        assert_eq!(claims, [Some("true"), Some("y"), None]);
    }

    #[test]
    fn white_space_around_a_claim_is_not_part_of_it() {
        let payload = r#"{"exp":2000,"sub":" alice ","plan":"\tpro\n","org":{"id":"\u00a0acme"},"device":" a  b "}"#;
        let verified = read(payload).expect("valid claims");
        assert_eq!(&*verified.user, "alice");
        let (tier, tenant) = (verified.tier.as_deref(), verified.tenant.as_deref());
        assert_eq!((tier, tenant), (Some("pro"), Some("acme")));
        assert_eq!(verified.claim("device"), Some("a  b"), "inside it stays");
    }

    #[test]
    fn a_member_that_is_called_so_comes_before_the_way_to_another() {
        let payload = r#"{"exp":2000,"sub":"a","org":{"id":"inside"},"org.id":"outside"}"#;
        assert_eq!(
            read(payload).expect("valid claims").tenant.as_deref(),
            Some("outside")
        );
    }

    #[test]
    fn what_is_missing_or_of_the_wrong_type_is_a_fault() {
        for (payload, fault) in [
            (r#"{"exp":2000}"#, CredentialFault::Claims),
            (r#"{"exp":2000,"sub":""}"#, CredentialFault::Claims),
            (r#"{"exp":2000,"sub":null}"#, CredentialFault::Claims),
            (r#"{"exp":2000,"sub":["a"]}"#, CredentialFault::Malformed),
            (r#"{"exp":2000,"sub":1.5}"#, CredentialFault::Malformed),
            (r#"{"exp":2000,"sub":"a\nb"}"#, CredentialFault::Malformed),
            (r#"{"exp":2000,"sub":"a\tb"}"#, CredentialFault::Malformed),
            (
                r#"{"exp":2000,"sub":"a\u0000"}"#,
                CredentialFault::Malformed,
            ),
            (r#"{"exp":2000,"sub":" \t "}"#, CredentialFault::Claims),
            (
                r#"{"exp":2000,"sub":"a","plan":{}}"#,
                CredentialFault::Malformed,
            ),
            (r#"{"sub":"a"}"#, CredentialFault::Claims),
            (r#"{"exp":"2000","sub":"a"}"#, CredentialFault::Malformed),
            (r#"{"exp":1e308,"sub":"a"}"#, CredentialFault::Malformed),
            (r#"{"exp":-1,"sub":"a"}"#, CredentialFault::Malformed),
            (r#"{"exp":940,"sub":"a"}"#, CredentialFault::Expired),
            (
                r#"{"exp":2000,"nbf":null,"sub":"a"}"#,
                CredentialFault::Malformed,
            ),
            (
                r#"{"exp":2000,"nbf":1060.5,"sub":"a"}"#,
                CredentialFault::Claims,
            ),
            (
                r#"{"exp":2000,"iss":1,"sub":"a"}"#,
                CredentialFault::Malformed,
            ),
            (
                r#"{"exp":2000,"aud":[1],"sub":"a"}"#,
                CredentialFault::Malformed,
            ),
        ] {
            assert_eq!(read(payload).err(), Some(fault), "{payload}");
        }
        let plain =
            read(r#"{"exp":2000,"sub":"a","plan":null,"device":[1]}"#).expect("valid claims");
        assert_eq!((plain.tier.as_deref(), plain.claim("device")), (None, None));
    }

    #[test]
    fn a_token_holds_until_its_expiry_and_the_leeway() {
        let (_, until) = rules()
            .read(br#"{"exp":2000.5,"sub":"a"}"#, 1000.0)
            .expect("valid claims");
        assert_eq!(until.to_bits(), 2060.5_f64.to_bits());
    }
}
