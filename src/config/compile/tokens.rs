//! `[[user]] from = "jwt"`: what tokens are verified with, and what they must say.

use std::{path::Path, sync::Arc, time::Duration};

use http::Uri;

use super::identity::{INVALID, header_key};
use crate::{
    config::{
        code::Code,
        diagnostic::{Problem, quote},
        file::Section,
        read,
        value::{Text, Value},
    },
    identity::{
        ClaimRules, KeySet, KeySource, KeysUrl, TokenSource,
        jwt::{ALGORITHMS, Algorithm},
    },
};

/// Keys of a few bytes each.
const MAX_BYTES: u64 = 1 << 20;

/// Where keys may come from, one of these.
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
    let refresh = section.duration(
        "refresh",
        Duration::from_secs(600),
        Duration::from_secs(10)..=Duration::from_secs(24 * 60 * 60),
    );
    let given: Vec<_> = KEY_SOURCES
        .iter()
        .filter_map(|key| section.get(key).map(|value| (*key, value)))
        .collect();
    let algorithms = algorithms(section, given.first().map(|(key, _)| *key));
    let (kind, value) = match given.as_slice() {
        [] => {
            if !KEY_SOURCES.iter().any(|key| section.is_in_doubt(key)) {
                let message = format!("{} has nothing to verify tokens with", section.title);
                let hint =
                    "add jwks_url = \"https://…\", jwks_file, public_key_file or secret_file";
                section.error(Problem::new(Code::MissingKey, message).hint(hint));
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
            let hint = "keep one; for two sets of keys write two [[user]] tables";
            value.error(Problem::new(Code::Contradiction, message).hint(hint));
            return None;
        }
    };
    if let Some(refresh) = refresh_value.filter(|_| kind != "jwks_url") {
        let message = format!("{} is read once: there is nothing to refresh", quote(kind));
        refresh.error(
            Problem::new(Code::Contradiction, message).hint("remove `refresh`, or use jwks_url"),
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

/// The algorithms that keys may have. A secret that anybody can fetch is none, and neither is a public key.
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
        value
            .error(Problem::new(Code::OutOfRange, message).hint("name those that the issuer uses"));
    }
    let algorithm = |item: &Value<'_>| {
        let text = item.text()?;
        let algorithm = text.choice(ALGORITHMS, &[], "")?;
        let is_secret = text.value.starts_with("HS");
        let problem = match kind {
            Some("secret_file") if !is_secret => "a secret is for HS256, HS384 or HS512",
            Some("jwks_url") if is_secret => "what is fetched from a URL is no secret",
            Some("public_key_file") if is_secret => "a public key is no secret",
            _ => return Some(algorithm),
        };
        let message = format!("{} does not go with {}", text.shown(), quote(kind?));
        text.error(Problem::new(Code::Contradiction, message).label(problem));
        None
    };
    let algorithms: Vec<_> = written.iter().filter_map(algorithm).collect();
    let is_whole = algorithms.len() == written.len() && !written.is_empty();
    if kind == Some("secret_file") && algorithms.len() > 1 {
        let message = "one secret has one algorithm, and these are several";
        value.error(
            Problem::new(Code::Contradiction, message).hint("keep the one that the issuer uses"),
        );
        return None;
    }
    is_whole.then_some(algorithms)
}

fn keys_url(text: &Text<'_>) -> Option<Uri> {
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
            // who writes a password into it does not want to see it again
            let shown = match value.contains('@') {
                true => "this".to_owned(),
                false => quote(value),
            };
            let message = format!("{shown} is not the URL of a key set");
            Problem::new(Code::BadAddress, message)
                .hint("write such as \"https://issuer.example.com/.well-known/jwks.json\"")
        })
    })?;
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_here = host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    if url.scheme_str() == Some("http") && !is_here {
        let message = format!("the keys behind {} come in the clear", text.shown());
        let hint = "whoever can change them on the way can be any user: use https://";
        text.warn(Problem::new(Code::KeysInTheClear, message).hint(hint));
    }
    Some(url)
}

fn key_file(
    kind: &str,
    path: &Text<'_>,
    base_dir: &Path,
    algorithms: &[Algorithm],
) -> Option<KeySet> {
    let unfit = |reason: String, hint: &str| {
        let message = format!("{} cannot be used: {reason}", path.shown());
        path.error(Problem::new(Code::BadFile, message).hint(hint));
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
                    "its tokens are rejected: name its algorithm in `algorithms`, or take it out";
                path.warn(Problem::new(Code::UnusedKey, message).hint(hint));
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
            "its form is {\"keys\": [{\"kty\": …}, …]}; `algorithms` says what keys may be for"
        }
        "public_key_file" => {
            "`openssl pkey -in PRIVATE.pem -pubout` writes one; see `algorithms` too"
        }
        _ => "`openssl rand -hex 32` makes one; it is used as it stands, without the line's end",
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
    let leeway = section.duration(
        "leeway",
        Duration::from_secs(30),
        Duration::ZERO..=Duration::from_secs(60),
    );
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

/// A token is for one service (RFC 8725 §3.8, §3.9): without a look at that, those for others pass as well.
fn warn_of_strangers(section: &Section<'_>, rules: &ClaimRules) {
    let message = match (&rules.issuer, rules.audience.as_slice()) {
        (Some(_), [_, ..]) => return,
        (None, []) => "any token with a known key is accepted, for whichever service it was issued",
        (Some(_), []) => "a token is accepted for whichever service it was issued",
        (None, [_, ..]) => "a token is accepted whoever issued it, as long as its key is known",
    };
    let missing = match (&rules.issuer, rules.audience.as_slice()) {
        (None, []) => {
            "add issuer = \"…\" and audience = \"…\", as the `iss` and `aud` of your tokens say"
        }
        (Some(_), _) => "add audience = \"…\", as the `aud` of your tokens says",
        (None, _) => "add issuer = \"…\", as the `iss` of your tokens says",
    };
    section.warn(Problem::new(Code::TokenForAnyone, message).hint(missing));
}

fn not_empty(text: &Text<'_>) -> Option<String> {
    if text.value.is_empty() {
        text.error(
            Problem::new(Code::OutOfRange, "this is empty")
                .hint("write what tokens say, or remove the key"),
        );
        return None;
    }
    Some(text.value.clone())
}
