//! What an upstream's own `RateLimit` and `RateLimit-Policy` fields say: are they lists as draft-11 has them, and which
//! names do they use?
//!
//! Both are Lists of Structured Fields (RFC 9651 §4.2) whose members are names with parameters. A client ignores a list of which one
//! member is malformed, ours included: so ours are not added to one, nor under a name that is taken. Names as Tokens are let
//! pass beside Strings, as the draft's authors consider. Read only where an upstream sends such a field.

use http::header::{GetAll, HeaderValue};

/// One of the two fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listed {
    /// `RateLimit-Policy`, whose members need `q`.
    Policies,
    /// `RateLimit`, whose members need `r`.
    Standings,
}

/// The names of the field's members, over all of its lines; `None` where it is not what the draft says.
pub(super) fn names(listed: Listed, lines: &GetAll<'_, HeaderValue>) -> Option<Vec<String>> {
    let lines: Vec<&[u8]> = lines.iter().map(HeaderValue::as_bytes).collect();
    let text = lines.join(&b", "[..]);
    let mut rest = Rest(&text);
    rest.skip(b" ");
    let mut names = Vec::new();
    while !rest.0.is_empty() {
        names.push(rest.member(listed)?);
        rest.skip(b" \t");
        if rest.0.is_empty() {
            break;
        }
        rest.take(b',')?;
        rest.skip(b" \t");
        if rest.0.is_empty() {
            return None;
        }
    }
    Some(names)
}

/// What is still to be read.
struct Rest<'a>(&'a [u8]);

/// A value, as far as anybody here needs it.
#[derive(Debug, PartialEq, Eq)]
enum Bare {
    Integer(i64),
    String(String),
    Token(String),
    Bytes,
    /// Decimal, boolean, date, display string.
    Other,
}

impl Rest<'_> {
    fn skip(&mut self, any: &[u8]) {
        while self.0.first().is_some_and(|byte| any.contains(byte)) {
            self.0 = &self.0[1..];
        }
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[byte])?;
        Some(())
    }

    fn next(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// As many bytes as are `like` this.
    fn run(&mut self, like: impl Fn(u8) -> bool) -> &[u8] {
        let end = self.0.iter().position(|&byte| !like(byte));
        let (run, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
        self.0 = rest;
        run
    }

    /// The name of a member whose parameters are what the field needs; of a parameter that is repeated, the last counts.
    fn member(&mut self, listed: Listed) -> Option<String> {
        let (Bare::String(name) | Bare::Token(name)) = self.bare()? else {
            return None;
        };
        let mut amount = None;
        let mut seconds = None;
        let mut fits = [true; 2];
        while self.take(b';').is_some() {
            self.skip(b" ");
            let key = self.key()?;
            let value = match self.take(b'=') {
                Some(()) => self.bare()?,
                None => Bare::Other,
            };
            match (listed, key.as_slice()) {
                (Listed::Policies, b"q") | (Listed::Standings, b"r") => amount = Some(value),
                (Listed::Policies, b"w") | (Listed::Standings, b"t") => seconds = Some(value),
                (Listed::Policies, b"qu") => fits[0] = matches!(value, Bare::String(_)),
                (_, b"pk") => fits[1] = value == Bare::Bytes,
                _ => {}
            }
        }
        let least = match listed {
            Listed::Policies => 1,
            Listed::Standings => 0,
        };
        let good = matches!(amount, Some(Bare::Integer(0..)))
            && seconds.is_none_or(|it| matches!(it, Bare::Integer(n) if n >= least))
            && fits == [true; 2];
        good.then_some(name)
    }

    fn key(&mut self) -> Option<Vec<u8>> {
        let starts = |byte: &u8| byte.is_ascii_lowercase() || *byte == b'*';
        self.0.first().filter(|&byte| starts(byte))?;
        let like = |byte: u8| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte)
        };
        Some(self.run(like).to_vec())
    }

    fn bare(&mut self) -> Option<Bare> {
        match *self.0.first()? {
            b'-' | b'0'..=b'9' => self.number(),
            b'"' => self.string(),
            b'*' | b'a'..=b'z' | b'A'..=b'Z' => {
                let like =
                    |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte);
                let token = self.run(like).to_vec();
                String::from_utf8(token).ok().map(Bare::Token)
            }
            b':' => self.bytes(),
            b'?' => {
                self.next();
                matches!(self.next()?, b'0' | b'1').then_some(Bare::Other)
            }
            b'@' => {
                self.next();
                matches!(self.number()?, Bare::Integer(_)).then_some(Bare::Other)
            }
            b'%' => {
                self.next();
                self.take(b'"')?;
                let like = |byte: u8| (0x20..=0x7e).contains(&byte) && byte != b'"';
                self.run(like);
                self.take(b'"').map(|()| Bare::Other)
            }
            _ => None,
        }
    }

    /// At most 15 digits, or 12 and three behind the point.
    fn number(&mut self) -> Option<Bare> {
        let negative = self.take(b'-').is_some();
        let digits = self.run(|byte| byte.is_ascii_digit());
        let (count, whole) = (
            digits.len(),
            str::from_utf8(digits).ok()?.parse::<i64>().ok()?,
        );
        if self.take(b'.').is_none() {
            return (count <= 15).then_some(Bare::Integer(if negative { -whole } else { whole }));
        }
        let fraction = self.run(|byte| byte.is_ascii_digit()).len();
        (count <= 12 && (1..=3).contains(&fraction)).then_some(Bare::Other)
    }

    fn string(&mut self) -> Option<Bare> {
        self.take(b'"')?;
        let mut text = String::new();
        loop {
            match self.next()? {
                b'"' => return Some(Bare::String(text)),
                b'\\' => match self.next()? {
                    escaped @ (b'"' | b'\\') => text.push(char::from(escaped)),
                    _ => return None,
                },
                byte @ 0x20..=0x7e => text.push(char::from(byte)),
                _ => return None,
            }
        }
    }

    fn bytes(&mut self) -> Option<Bare> {
        self.take(b':')?;
        self.run(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte));
        self.take(b':').map(|()| Bare::Bytes)
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName};

    use super::*;

    fn read(listed: Listed, lines: &[&str]) -> Option<Vec<String>> {
        let name = HeaderName::from_static("ratelimit");
        let mut headers = HeaderMap::new();
        for line in lines {
            let value = HeaderValue::from_bytes(line.as_bytes()).expect("fields may hold it");
            headers.append(&name, value);
        }
        names(listed, &headers.get_all(&name))
    }

    fn policies(line: &str) -> Option<Vec<String>> {
        read(Listed::Policies, &[line])
    }

    fn standings(line: &str) -> Option<Vec<String>> {
        read(Listed::Standings, &[line])
    }

    fn some(names: &[&str]) -> Option<Vec<String>> {
        Some(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn policies_of_the_draft_are_read() {
        let two = r#""burst";q=100;w=60,"daily";q=1000;w=86400"#;
        assert_eq!(policies(two), some(&["burst", "daily"]));
        assert_eq!(policies(r#""burst"; q=100; w=60"#), some(&["burst"]));
        // the padding bits of its last digit are not zero
        let key = r#""p";q=100;w=60;pk=:cHsdsRa894==:"#;
        assert_eq!(policies(key), some(&["p"]));
        let slots = r#""inflight";q=20;qu="concurrent-requests""#;
        assert_eq!(policies(slots), some(&["inflight"]));
        assert_eq!(policies("burst;q=100;w=60"), some(&["burst"]), "a Token");
    }

    #[test]
    fn standings_of_the_draft_are_read() {
        assert_eq!(standings(r#""default";r=50;t=30"#), some(&["default"]));
        let key = r#""default";r=999;pk=:dHJpYWwxMjEzMjM=:"#;
        assert_eq!(standings(key), some(&["default"]));
        assert_eq!(standings(r#""a";r=1;r=2"#), some(&["a"]));
        assert_eq!(standings(r#""a";r=x;r=2"#), some(&["a"]), "the last counts");
        assert_eq!(standings(r#""a";r=999999999999999"#), some(&["a"]));
        assert_eq!(standings(r#""a\"b";r=1"#), some(&["a\"b"]));
        assert_eq!(standings("\"a\";r=1\t,\t\"b\";r=2"), some(&["a", "b"]));
        let two_lines = [r#""a";r=1"#, r#""b";r=2"#];
        assert_eq!(read(Listed::Standings, &two_lines), some(&["a", "b"]));
        let unknown = r#""a";r=1;x-note=%"f%c3%bc";at=@1;ok=?1;d=-1.5;tok=*a/b"#;
        assert_eq!(standings(unknown), some(&["a"]));
        assert_eq!(standings(""), some(&[]));
    }

    #[test]
    fn what_another_draft_or_a_slip_wrote_is_not() {
        for line in [
            r#""a" ;r=1"#,
            r#""a";t=5"#,
            r#""a";r=-1"#,
            r#""a";r=1.5"#,
            r#""a";r="5""#,
            r#""a";r"#,
            r#""a";R=1"#,
            r#""a";r=1,"#,
            r#""a";r=1000000000000000"#,
            r#""café";r=1"#,
            r#""a;r=1"#,
            r#""a\n";r=1"#,
            r#""a";r=1 "b";r=2"#,
            r#"("a");r=1"#,
            r#"42;r=1"#,
            r#""a";r=1;pk="x""#,
            r#""a";r=1;t=-5"#,
            "limit=100, remaining=45, reset=30",
            r#""api";a=99;w=60;pk=:R0VUH2FsaWNl:"#,
        ] {
            assert_eq!(standings(line), None, "{line}");
        }
        for line in [
            r#""x";q=100;w=0"#,
            "100;w=60;burst=20",
            r#""x";w=60"#,
            r#""x";q=1;qu=requests"#,
        ] {
            assert_eq!(policies(line), None, "{line}");
        }
    }
}
