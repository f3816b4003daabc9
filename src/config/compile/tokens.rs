//! `[[user]] from = "jwt"`: the keys that verify tokens, and the claims that tokens must have.

use std::{path::Path, sync::Arc};

use http::Uri;

use super::credential::{INVALID, header_key};
use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        read,
        section::Section,
        value::ConfigValue,
    },
    identity::{
        ClaimRules, KeySet, KeySource, KeysUrl, TokenSource,
        jwt::{ALGORITHMS, Algorithm},
    },
};

/// The largest key file. A key takes at most a few kB.
const MAX_BYTES: u64 = 1 << 20;

/// The sources of keys; a table has exactly one.
const KEY_SOURCES: [&str; 4] = ["jwks_file", "jwks_url", "secret_file", "public_key_file"];

pub(super) fn token_source(section: &Section<'_>, base_dir: &Path) -> Option<TokenSource> {
    let header = header_key(section, "header", http::header::AUTHORIZATION.as_str());
    let keys = keys(section, base_dir);
    let claims = claims(section);
    let invalid = section.choice("invalid", INVALID);
    Some(TokenSource {
        header: header?,
        keys: keys?,
        claims: claims?,
        invalid: invalid?,
    })
}

fn keys(section: &Section<'_>, base_dir: &Path) -> Option<KeySource> {
    let refresh_value = section.get("refresh");
    let refresh = section.duration("refresh");
    let given: Vec<_> = KEY_SOURCES
        .iter()
        .filter_map(|key| section.get(key).map(|value| (*key, value)))
        .collect();
    let algorithms = algorithms(section, given.first().map(|(key, _)| *key));
    let (kind, value) = match given.as_slice() {
        [] => {
            if !KEY_SOURCES.iter().any(|key| section.is_in_doubt(key)) {
                let message = format!("{} has no keys to verify tokens with", section.title);
                let hint =
                    "add jwks_url = \"https://…\", jwks_file, public_key_file or secret_file";
                section.error(PendingDiagnostic::new(Code::MissingKey, message).hint(hint));
            }
            return None;
        }
        [(kind, value)] => (*kind, value),
        [(first, _), (second, value), ..] => {
            let message = format!(
                "both {} and {} say where the keys are",
                quote(first),
                quote(second)
            );
            let hint = "keep one; for two key sets write two [[user]] tables";
            value.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
            return None;
        }
    };
    if let Some(refresh) = refresh_value.filter(|_| kind != "jwks_url") {
        let message = format!("{} is read once: there is nothing to refresh", quote(kind));
        refresh.error(
            PendingDiagnostic::new(Code::Contradiction, message)
                .hint("remove `refresh`, or use jwks_url"),
        );
    }
    let (text, algorithms) = (value.text()?, algorithms?);
    if kind == "jwks_url" {
        return Some(KeySource::Url(KeysUrl {
            url: keys_url(&text)?,
            refresh,
            algorithms,
        }));
    }
    let set = key_file(kind, &text, base_dir, &algorithms)?;
    Some(KeySource::Fixed(Arc::new(set)))
}

/// The algorithms that keys may have. HMAC needs a secret, and neither a fetched key set nor a
/// public key is one.
fn algorithms(section: &Section<'_>, kind: Option<&str>) -> Option<Vec<Algorithm>> {
    let Some(value) = section.get("algorithms") else {
        return Some(match kind {
            Some("secret_file") => vec![Algorithm::HS256],
            _ => vec![Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA],
        });
    };
    let written = value.array()?;
    if written.is_empty() {
        let message = format!("{} is empty: no token could be accepted", value.what);
        value.error(
            PendingDiagnostic::new(Code::OutOfRange, message)
                .hint("list the algorithms that the issuer uses"),
        );
    }
    let algorithm = |item: &ConfigValue<'_>| {
        let text = item.text()?;
        let algorithm = text.choice(ALGORITHMS, &[], "")?;
        let is_secret = text.value.starts_with("HS");
        let problem = match kind {
            Some("secret_file") if !is_secret => "a secret is for HS256, HS384 or HS512",
            Some("jwks_url") if is_secret => "keys from a URL are not secret",
            Some("public_key_file") if is_secret => "a public key is not secret",
            _ => return Some(algorithm),
        };
        let message = format!("{} cannot be used with {}", text.shown(), quote(kind?));
        text.error(PendingDiagnostic::new(Code::Contradiction, message).label(problem));
        None
    };
    let algorithms: Vec<_> = written.iter().filter_map(algorithm).collect();
    let is_whole = algorithms.len() == written.len() && !written.is_empty();
    if kind == Some("secret_file") && algorithms.len() > 1 {
        let message = "a secret has one algorithm, and this list has several";
        value.error(
            PendingDiagnostic::new(Code::Contradiction, message)
                .hint("keep the one that the issuer uses"),
        );
        return None;
    }
    is_whole.then_some(algorithms)
}

fn keys_url(text: &ExpandedText<'_>) -> Option<Uri> {
    let url = text.parse("a URL", |value| {
        let uri: Option<Uri> = value.parse().ok();
        let known = |uri: &Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
                && uri
                    .authority()
                    .is_some_and(|authority| !authority.as_str().contains('@'))
        };
        uri.filter(known).ok_or_else(|| {
            // do not echo a URL that contains a password
            let shown = match value.contains('@') {
                true => "this".to_owned(),
                false => quote(value),
            };
            let message = format!("{shown} is not a key set URL");
            PendingDiagnostic::new(Code::BadAddress, message)
                .hint("write for example \"https://issuer.example.com/.well-known/jwks.json\"")
        })
    })?;
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_here = host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    if url.scheme_str() == Some("http") && !is_here {
        let message = format!("the keys at {} are fetched without TLS", text.shown());
        let hint = "anyone who can change them in transit can impersonate any user: use https://";
        text.warn(PendingDiagnostic::new(Code::KeysInTheClear, message).hint(hint));
    }
    Some(url)
}

fn key_file(
    kind: &str,
    path: &ExpandedText<'_>,
    base_dir: &Path,
    algorithms: &[Algorithm],
) -> Option<KeySet> {
    let unfit = |reason: String, hint: &str| {
        let message = format!("{} cannot be used: {reason}", path.shown());
        path.error(PendingDiagnostic::new(Code::BadFile, message).hint(hint));
    };
    let bytes = match path
        .document
        .files
        .bytes(&base_dir.join(&path.value), MAX_BYTES)
    {
        Ok(bytes) => bytes,
        Err(error) => {
            unfit(error, read::HINT);
            return None;
        }
    };
    let set = match kind {
        "jwks_file" => KeySet::from_jwks(&bytes, algorithms).map(|(set, unused)| {
            for reason in unused {
                let message = format!("a key in {} is not used: {reason}", path.shown());
                let hint =
                    "its tokens are rejected: add its algorithm to `algorithms`, or remove the key";
                path.warn(PendingDiagnostic::new(Code::UnusedKey, message).hint(hint));
            }
            set
        }),
        "public_key_file" => KeySet::from_pem(&String::from_utf8_lossy(&bytes), algorithms),
        _ => {
            let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
            let secret = line.strip_suffix(b"\r").unwrap_or(line);
            let algorithm = algorithms.first().copied().unwrap_or(Algorithm::HS256);
            KeySet::from_secret(secret, algorithm)
        }
    };
    let hint = match kind {
        "jwks_file" => {
            "the form is {\"keys\": [{\"kty\": …}, …]}; `algorithms` lists the accepted algorithms"
        }
        "public_key_file" => {
            "`openssl pkey -in PRIVATE.pem -pubout` writes one; see `algorithms` too"
        }
        _ => {
            "`openssl rand -hex 32` makes one; the secret is the file's bytes without the final line break"
        }
    };
    set.map_err(|error| unfit(error.to_string(), hint)).ok()
}

fn claims(section: &Section<'_>) -> Option<ClaimRules> {
    let name = |key: &'static str| -> Option<Option<String>> {
        match section.get(key) {
            None => Some(None),
            Some(value) => not_empty(&value.text()?).map(Some),
        }
    };
    let issuer = name("issuer");
    let audience = match section.get("audience") {
        None => Some(Vec::new()),
        Some(value) if value.is_array() => {
            let items = value.array()?;
            items.iter().map(|item| not_empty(&item.text()?)).collect()
        }
        Some(value) => value
            .text()
            .and_then(|text| not_empty(&text))
            .map(|one| vec![one]),
    };
    let leeway = section.duration("leeway");
    let (user, tier, tenant) = (name("user_claim"), name("tier_claim"), name("tenant_claim"));
    let rules = ClaimRules {
        issuer: issuer?,
        audience: audience?,
        leeway,
        user: user?.unwrap_or_else(|| "sub".to_owned()),
        tier: tier?,
        tenant: tenant?,
        others: Vec::new(),
    };
    warn_of_strangers(section, &rules);
    Some(rules)
}

/// Warns when tokens for other services pass: a token is for one service (RFC 8725 §3.8, §3.9).
fn warn_of_strangers(section: &Section<'_>, rules: &ClaimRules) {
    let message = match (&rules.issuer, rules.audience.as_slice()) {
        (Some(_), [_, ..]) => return,
        (None, []) => {
            "tokens of any issuer and for any service are accepted, if their key is known"
        }
        (Some(_), []) => "tokens that were issued for other services are accepted",
        (None, [_, ..]) => "tokens of any issuer are accepted, if their key is known",
    };
    let missing = match (&rules.issuer, rules.audience.as_slice()) {
        (None, []) => "add issuer = \"…\" and audience = \"…\", the `iss` and `aud` of your tokens",
        (Some(_), _) => "add audience = \"…\", the `aud` of your tokens",
        (None, _) => "add issuer = \"…\", the `iss` of your tokens",
    };
    section.warn(PendingDiagnostic::new(Code::TokenForAnyone, message).hint(missing));
}

fn not_empty(text: &ExpandedText<'_>) -> Option<String> {
    if text.value.is_empty() {
        text.error(
            PendingDiagnostic::new(Code::OutOfRange, "this is empty")
                .hint("write the value that your tokens have, or remove the key"),
        );
        return None;
    }
    Some(text.value.clone())
}
