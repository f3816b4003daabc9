//! The words and marks of Rust code, without the parts that only tests compile.

/// A word, `::`, or a mark of one character.
pub type Token<'a> = &'a str;

/// Splits code whose comments and literals are blank. White space separates and is dropped.
pub fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match rest.find(|c: char| !is_of_word(c)) {
            Some(0) if rest.starts_with("::") => 2,
            Some(0) => first.len_utf8(),
            Some(end) => end,
            None => rest.len(),
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    found
}

pub fn is_word(token: Token<'_>) -> bool {
    token.starts_with(is_of_word)
}

fn is_of_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// The index after the bracket that closes the one at `open`.
pub fn after_closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// The tokens without items under `#[cfg(test)]`, and the names of the test modules that have files
/// of their own.
pub fn without_tests<'a>(all: &[Token<'a>]) -> (Vec<Token<'a>>, Vec<&'a str>) {
    let (mut kept, mut test_modules) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < all.len() {
        if !all[at..].starts_with(&["#", "["]) {
            kept.push(all[at]);
            at += 1;
            continue;
        }
        let end = after_closing(all, at + 1);
        let attribute = &all[at..end];
        let is_test = attribute.get(2) == Some(&"cfg")
            && attribute.contains(&"test")
            && !attribute.contains(&"not");
        if !is_test {
            kept.extend(attribute);
            at = end;
            continue;
        }
        let item = skip_attributes(all, end);
        at = item_end(all, item);
        if let Some(module) = all[item..at]
            .windows(3)
            .find(|of| of[0] == "mod" && of[2] == ";")
        {
            test_modules.push(module[1]);
        }
    }
    (kept, test_modules)
}

fn skip_attributes(all: &[Token<'_>], mut at: usize) -> usize {
    while all[at..].starts_with(&["#", "["]) {
        at = after_closing(all, at + 1);
    }
    at
}

/// Where an item, statement or field that starts at `start` ends.
fn item_end(all: &[Token<'_>], start: usize) -> usize {
    const FIELD_OR_ARM: &[&str] = &[
        "pub", "fn", "const", "impl", "struct", "enum", "type", "async",
    ];
    let may_end_with_comma = !all
        .get(start)
        .is_some_and(|first| FIELD_OR_ARM.contains(first));
    let mut at = start;
    while at < all.len() {
        match all[at] {
            ";" => return at + 1,
            "," if may_end_with_comma => return at + 1,
            "}" => return at,
            "{" => return after_closing(all, at),
            "(" | "[" => at = after_closing(all, at),
            _ => at += 1,
        }
    }
    at
}
