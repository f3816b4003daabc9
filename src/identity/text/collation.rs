//! Folds a text as accent-insensitive comparisons do, so that equal texts share a bucket.
//!
//! The measure is the Unicode collation (DUCET) at level 1, which is MySQL's default comparison.
//! [`table`] lists the code points that it ignores, such as the vowel points of Syriac, and those
//! that it equates with ASCII letters or digits, such as `ø` and the digits of every script. Other
//! code points keep their own value.

mod table;

use std::{borrow::Cow, cmp::Ordering};

use icu_normalizer::DecomposingNormalizerBorrowed;

/// The text in the form used for comparison. White space around it, case, compatibility forms,
/// accents and invisible characters are removed. Each character is folded without context, so `ς`
/// becomes `σ`. Upper-casing comes first because some lower-case letters share one upper case: `ſ`
/// becomes `s`.
pub(super) fn folded(text: &str) -> String {
    if text.is_ascii() {
        return text.trim().to_ascii_lowercase();
    }
    let alike = unaccented(text);
    let cased = alike.trim().chars().flat_map(char::to_uppercase);
    let cased: String = cased.flat_map(char::to_lowercase).collect();
    // some letters have an accent only in one case
    unaccented(&cased).trim().to_owned()
}

/// Removes compatibility forms (NFKD), accents and invisible characters, and replaces letters and
/// digits that equal ASCII ones.
pub(super) fn unaccented(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    // a few code points equal something else than their parts do
    let before = text.chars().flat_map(Equal::of);
    let parts = DecomposingNormalizerBorrowed::new_nfkd().normalize_iter(before);
    let mut out = String::with_capacity(text.len());
    for part in parts.flat_map(Equal::of) {
        // the one contraction with ASCII: `l·` equals `l`
        let contracts = part == MIDDLE_DOT && out.ends_with(['l', 'L']);
        if !contracts && !is_accent(part) && !is_unseen(part) {
            out.push(part);
        }
    }
    Cow::Owned(out)
}

/// U+00B7, which makes an `l` a geminated one in Catalan.
const MIDDLE_DOT: char = '\u{b7}';

/// What a code point equals, one character after the other.
enum Equal {
    Itself(Option<char>),
    Ascii(std::str::Chars<'static>),
}

impl Equal {
    fn of(character: char) -> Self {
        match character {
            _ if character.is_ascii() => Equal::Itself(Some(character)),
            _ if let Some(ascii) = ascii(character) => Equal::Ascii(ascii.chars()),
            _ => Equal::Itself((!is_ignorable(character)).then_some(character)),
        }
    }
}

impl Iterator for Equal {
    type Item = char;

    fn next(&mut self) -> Option<char> {
        match self {
            Equal::Itself(character) => character.take(),
            Equal::Ascii(rest) => rest.next(),
        }
    }
}

/// The letters or digits that this code point equals.
fn ascii(character: char) -> Option<&'static str> {
    let after = table::EQUAL.partition_point(|(first, _)| *first <= character);
    let (first, run) = table::EQUAL.get(after.checked_sub(1)?)?;
    let distance = u32::from(character) - u32::from(*first);
    run.split(' ').nth(usize::try_from(distance).ok()?)
}

/// Whether a code point equals nothing.
fn is_ignorable(character: char) -> bool {
    let place = table::IGNORABLE.binary_search_by(|(first, last)| match character {
        _ if character < *first => Ordering::Greater,
        _ if character > *last => Ordering::Less,
        _ => Ordering::Equal,
    });
    place.is_ok()
}

/// Combining marks that other accent-insensitive comparisons ignore, or later Unicode versions.
/// Vowel signs, as in Indic scripts, act as letters and are kept.
fn is_accent(character: char) -> bool {
    matches!(character,
        '\u{300}'..='\u{36f}' | '\u{483}'..='\u{489}' | '\u{591}'..='\u{5bd}' | '\u{5bf}'..='\u{5c7}'
        | '\u{610}'..='\u{61a}' | '\u{64b}'..='\u{65f}' | '\u{670}' | '\u{6d6}'..='\u{6ed}'
        | '\u{1ab0}'..='\u{1aff}' | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}'
        | '\u{3099}' | '\u{309a}' | '\u{fe20}'..='\u{fe2f}')
}

/// Invisible characters (`Default_Ignorable_Code_Point`), such as a soft hyphen or zero-width
/// space.
fn is_unseen(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every code point that equals ASCII letters or digits, or nothing.
    fn vectors() -> Vec<(char, &'static str)> {
        let lines = include_str!("../../../tests/vectors/collation_vectors.txt").lines();
        let vectors: Vec<_> = lines
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let (code, ascii) = line.split_once(' ').unwrap_or((line, ""));
                let code = u32::from_str_radix(code, 16).expect("a code point");
                (char::from_u32(code).expect("a character"), ascii)
            })
            .collect();
        assert!(vectors.len() > 4_000, "{} vectors", vectors.len());
        vectors
    }

    #[test]
    fn every_code_point_folds_to_what_the_collation_equates_it_with() {
        let wrong: Vec<_> = vectors()
            .into_iter()
            .filter(|(character, ascii)| {
                folded(&format!("Al{character}ice")) != format!("al{ascii}ice")
            })
            .collect();
        assert!(wrong.is_empty(), "{} wrong: {wrong:x?}", wrong.len());
    }

    #[test]
    fn ignorable_code_points_make_no_difference_wherever_they_are() {
        let ignorable = vectors().into_iter().filter(|(_, ascii)| ascii.is_empty());
        let all: String = ignorable.map(|(character, _)| character).collect();
        for text in [
            format!("alice{all}"),
            format!("{all}alice"),
            format!("{all} a{all}lice {all}"),
        ] {
            assert_eq!(folded(&text), "alice");
        }
    }

    #[test]
    fn texts_that_the_collation_equates_are_one_text() {
        for (found, equal) in [
            ("alice\u{730}\u{74a}", "alice"),
            ("al\u{640}ice\u{70f}\u{600}\u{fff9}", "alice"),
            ("\u{363}lic\u{364}", "alice"),
            ("user\u{661}\u{6f2}\u{967}", "user121"),
            ("SØREN Đorđe Łukasz", "soren dorde lukasz"),
            ("Æsir Straße cœur", "aesir strasse coeur"),
            ("col·lega coŀlega COL\u{387}LEGA", "collega collega collega"),
            ("🅰🄋⓫", "a011"),
        ] {
            assert_eq!(folded(found), equal, "{found}");
        }
        assert_eq!(folded("\u{430}lice"), "\u{430}lice", "a Cyrillic letter");
        assert_eq!(folded("a·b"), "a·b");
    }

    #[test]
    fn folding_a_character_twice_is_folding_it_once() {
        for character in '\0'..='\u{1ffff}' {
            let once = folded(character.encode_utf8(&mut [0; 4]));
            assert_eq!(folded(&once), once, "{character:?}");
        }
    }

    #[test]
    fn the_tables_are_sorted() {
        let ignorable = table::IGNORABLE;
        assert!(ignorable.iter().all(|(first, last)| first <= last));
        assert!(ignorable.windows(2).all(|two| two[0].1 < two[1].0));
        assert!(table::EQUAL.windows(2).all(|two| {
            let runs = u32::try_from(two[0].1.split(' ').count()).expect("a short run");
            u32::from(two[0].0) + runs <= u32::from(two[1].0)
        }));
    }

    proptest! {
        #[test]
        fn folding_twice_is_folding_once(value in ".{0,20}") {
            let once = folded(&value);
            let twice = folded(&once);
            prop_assert_eq!(once, twice);
        }
    }
}
