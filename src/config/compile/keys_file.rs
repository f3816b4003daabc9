//! The keys file of `[[user]] from = "api_key"`: digests of API keys, each with its user.
//!
//! The file holds digests because more people can read it than may use the keys. A digest has 256
//! bits and a key is itself random, so a plain hash is enough: there is no dictionary to try.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use super::{check_users::WrittenTier, names::check_name};
use crate::{
    config::{
        code::Code, diagnostic::PendingDiagnostic, document::Document, expanded_text::ExpandedText,
        keys, read, section::Section, source::SourceText, value::ConfigValue,
    },
    identity::{ApiKey, KnownKeys},
};

/// Room for a few hundred thousand keys.
const MAX_BYTES: u64 = 64 << 20;

const HINT: &str = "a digest has 64 characters of 0-9 a-f: `tidegate hash-key` prints it";

/// Loads the keys file at `path`. Reports problems at their location in that file. Adds new tiers
/// to `tiers`.
pub(super) fn load(
    path: &ExpandedText<'_>,
    base_dir: &Path,
    tiers: &mut Vec<WrittenTier>,
) -> Option<KnownKeys> {
    let text = match path
        .document
        .files
        .text(&base_dir.join(&path.value), MAX_BYTES)
    {
        Ok(text) => text,
        Err(error) => {
            let message = format!("{} cannot be read: {error}", path.shown());
            path.error(PendingDiagnostic::new(Code::BadFile, message).hint(read::HINT));
            return None;
        }
    };
    let name = base_dir.join(path.raw()).display().to_string();
    let source = SourceText::new(&name, text);
    let document = Document {
        source: &source,
        ..path.document
    };
    let tables = document.parse(source.text())?;
    let file = Section::open(
        document,
        "the keys file".to_owned(),
        0..0,
        &keys::KEYS_FILE,
        Some(&tables),
    );
    let mut seen = EntriesSeen {
        digests: HashMap::new(),
        tiers: tiers.iter().map(|tier| tier.name.clone()).collect(),
        new_tiers: tiers,
    };
    let entries = file.named("keys", &keys::API_KEY);
    let keys: Vec<_> = entries
        .iter()
        .map(|(name, table)| api_key(name, table, &mut seen))
        .collect();
    file.finish();
    let keys: Option<Vec<ApiKey>> = keys.into_iter().collect();
    keys.map(KnownKeys::new)
}

/// What earlier entries of the file contained.
struct EntriesSeen<'a> {
    /// Digest to its line.
    digests: HashMap<[u8; 32], usize>,
    tiers: HashSet<String>,
    new_tiers: &'a mut Vec<WrittenTier>,
}

impl EntriesSeen<'_> {
    fn note(&mut self, tier: &ExpandedText<'_>) {
        if self.tiers.insert(tier.value.clone()) {
            let source = tier.document.source;
            self.new_tiers.push(WrittenTier {
                name: tier.value.clone(),
                shown: tier.shown(),
                file: source.name().to_owned(),
                place: source.place(tier.span.clone()),
            });
        }
    }
}

fn api_key(
    name: &ExpandedText<'_>,
    table: &ConfigValue<'_>,
    seen: &mut EntriesSeen<'_>,
) -> Option<ApiKey> {
    let section = Section::of(table, table.what.to_string(), &keys::API_KEY)?;
    let digest = section
        .require("sha256", HINT)
        .and_then(|value| value.text());
    let user = section.get("user").map(|value| value.text());
    let tier = section.get("tier").map(|value| value.text());
    let tenant = section.get("tenant").map(|value| value.text());
    section.finish();
    let digest = digest?;
    let Some(sha256) = parse_digest(&digest.value) else {
        let message = format!("`sha256` in {} is not a SHA-256 digest", table.what);
        digest.error(PendingDiagnostic::new(Code::BadDigest, message).hint(HINT));
        return None;
    };
    let line = digest.document.source.line(digest.span.start);
    if let Some(first) = seen.digests.insert(sha256, line) {
        let message = format!("this key is already on line {first}");
        digest.error(
            PendingDiagnostic::new(Code::Duplicate, message)
                .hint("a key belongs to one user: remove one of the entries"),
        );
    }
    let tier = given(tier)?;
    if let Some(tier) = &tier {
        check_name(tier, "a tier");
        seen.note(tier);
    }
    let named = |text: Option<ExpandedText<'_>>| text.map(|text| text.value);
    let user = named(given(user)?).unwrap_or_else(|| name.value.clone());
    Some(ApiKey {
        sha256,
        user,
        tier: named(tier),
        tenant: named(given(tenant)?),
    })
}

/// Turns "present but invalid" (`Some(None)`) into `None`, so `?` fails the entry.
fn given<T>(value: Option<Option<T>>) -> Option<Option<T>> {
    value.map_or(Some(None), |value| value.map(Some))
}

fn parse_digest(text: &str) -> Option<[u8; 32]> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return None;
    };
    let digit = |byte: u8| {
        char::from(byte)
            .to_digit(16)
            .and_then(|digit| u8::try_from(digit).ok())
    };
    let pairs: &[[u8; 2]; 32] = pairs.try_into().ok()?;
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_64_hexadecimal_characters() {
        assert_eq!(
            parse_digest(&"0aF1".repeat(16)),
            Some([0x0a, 0xf1].repeat(16).try_into().expect("32 bytes"))
        );
        for bad in [
            "",
            "0a",
            &"0".repeat(63),
            &"0".repeat(65),
            &"g".repeat(64),
            &"é".repeat(32),
        ] {
            assert_eq!(parse_digest(bad), None, "{bad}");
        }
    }
}
