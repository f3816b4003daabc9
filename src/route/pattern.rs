//! Validates the host, path and method patterns of routes.

use std::fmt;

use http::Method;

use super::path;

/// The most segments in a route's path. Bounds the depth of a lookup.
pub const SEGMENTS_MAX: usize = 64;

/// The requests that one route matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Exact names or `*.example.com`. Empty matches any host.
    pub hosts: Vec<String>,
    /// `/exact`, `/users/{id}` or `/files/{*rest}`.
    pub path: String,
    /// Empty matches any method.
    pub methods: Vec<Method>,
}

/// `POST api.example.com/login`.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, method) in self.methods.iter().enumerate() {
            write!(f, "{}{method}", if place == 0 { "" } else { "," })?;
        }
        if !self.methods.is_empty() {
            f.write_str(" ")?;
        }
        write!(f, "{}{}", self.hosts.join(","), self.path)
    }
}

/// One segment of a route's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PatternSegment<'a> {
    /// `users`: matches itself.
    Literal(&'a str),
    /// `{id}`: matches any one segment.
    Parameter(&'a str),
    /// `{*rest}`: matches zero or more segments; only at the end.
    Rest(&'a str),
}

/// Splits a route's path into segments; none for `/`. On failure, returns the problem and how to
/// fix it.
pub(super) fn parse_path(path: &str) -> Result<Vec<PatternSegment<'_>>, (String, String)> {
    refuse_foreign(path)?;
    require_normal(path)?;
    let wrong =
        |problem: String, hint: &str| Err((format!("path `{path}` {problem}"), hint.to_owned()));
    let mut segments: Vec<PatternSegment<'_>> = Vec::new();
    for text in path.split('/').filter(|text| !text.is_empty()) {
        let segment = match parse_segment(text) {
            Ok(segment) => segment,
            Err(problem) => {
                return wrong(
                    problem,
                    "write `/literal`, `/{name}` or, at the end, `/{*name}`",
                );
            }
        };
        if let Some(PatternSegment::Rest(name)) = segments.last() {
            return wrong(
                format!("continues after `{{*{name}}}`"),
                "`{*name}` matches the rest of the path: put it last",
            );
        }
        if let PatternSegment::Parameter(name) | PatternSegment::Rest(name) = segment
            && segments.iter().any(|earlier| matches!(earlier, PatternSegment::Parameter(taken) | PatternSegment::Rest(taken) if *taken == name))
        {
            return wrong(format!("has two parameters named `{name}`"), "give each parameter its own name");
        }
        segments.push(segment);
    }
    if segments.len() > SEGMENTS_MAX {
        return wrong(
            format!("has more than {SEGMENTS_MAX} segments"),
            "end it with `/{*rest}`",
        );
    }
    Ok(segments)
}

/// Rejects wildcard syntax of other programs, which would match literally here.
fn refuse_foreign(path: &str) -> Result<(), (String, String)> {
    if path.starts_with(['~', '^']) {
        let hint = "write `/literal`, `/{name}` for one segment or, at the end, `/{*rest}` for everything below";
        let problem =
            format!("path `{path}` looks like a regular expression, which is not supported");
        return Err((problem, hint.to_owned()));
    }
    let mut at = 0;
    for text in path.split('/') {
        let (before, after) = (&path[..at], &path[at + text.len()..]);
        at += text.len() + 1;
        let is_foreign = match text.strip_prefix(':') {
            Some(name) => !name.is_empty(),
            None => !text.starts_with('{') && (text.starts_with('*') || text.ends_with('*')),
        };
        if !is_foreign {
            continue;
        }
        let sign = if text.starts_with(':') { ':' } else { '*' };
        let name = text.trim_matches(':');
        let hint = match is_name(name) && sign == ':' {
            true => format!("write `{before}{{{name}}}{after}` for any one segment"),
            false if after.is_empty() => format!(
                "write `{before}{{*rest}}` for everything below, `{before}{{name}}` for one segment"
            ),
            false => format!(
                "write `{before}{{name}}{after}` for any one segment; `{{*rest}}` must be last"
            ),
        };
        return Err((format!("path `{path}`: `{sign}` is not a wildcard"), hint));
    }
    Ok(())
}

/// Whether the text is a valid parameter name.
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    !name.is_empty() && name.bytes().all(allowed)
}

fn parse_segment(text: &str) -> Result<PatternSegment<'_>, String> {
    let Some(inside) = text
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
    else {
        return match text.contains(['{', '}']) {
            true => Err(format!(
                "has a brace inside the segment `{text}`: a parameter must be a whole segment"
            )),
            false => Ok(PatternSegment::Literal(text)),
        };
    };
    let (rest, name) = match inside.strip_prefix('*') {
        Some(name) => (true, name),
        None => (false, inside),
    };
    match (is_name(name), rest) {
        (false, _) => Err(format!(
            "has the parameter `{text}`, whose name may contain only letters, digits, `_` and `-`"
        )),
        (true, true) => Ok(PatternSegment::Rest(name)),
        (true, false) => Ok(PatternSegment::Parameter(name)),
    }
}

/// Requests are matched by their normalised path, so a route whose path is not normal would never
/// match.
fn require_normal(path: &str) -> Result<(), (String, String)> {
    if path.contains('?') {
        let hint = "remove the query: routes match only the path".to_owned();
        return Err((format!("path `{path}` has a query"), hint));
    }
    match path::normalise(path) {
        Ok(normal) if normal.key == path => Ok(()),
        Ok(normal) => {
            let hint = format!(
                "write `{}`: paths are normalised before they are matched",
                normal.key
            );
            Err((format!("path `{path}` is not in normal form"), hint))
        }
        Err(path::PathError::NotOriginForm) => Err((
            format!("path `{path}` does not start with a slash"),
            format!("write `/{path}`"),
        )),
        Err(path::PathError::ForbiddenCharacter) => {
            let hint = format!("write it percent-encoded: `{}`", percent_encoded(path));
            Err((
                format!("path `{path}` contains a character that is not allowed in a path"),
                hint,
            ))
        }
        Err(error) => {
            let hint = "tidegate answers such requests with 400 before routing".to_owned();
            Err((format!("tidegate rejects path `{path}`: {error}"), hint))
        }
    }
}

fn percent_encoded(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        match byte {
            0x21..=0x7e if !matches!(byte, b'\\' | b'#') => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Rejects `get`: methods are case-sensitive (RFC 9110 §9.1), so it would never match. On failure,
/// returns the problem and how to fix it.
pub(super) fn check_method(method: &Method) -> Result<(), (String, String)> {
    const STANDARD: [Method; 9] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::CONNECT,
        Method::OPTIONS,
        Method::TRACE,
        Method::PATCH,
    ];
    match STANDARD.iter().find(|standard| {
        *standard != method && standard.as_str().eq_ignore_ascii_case(method.as_str())
    }) {
        Some(standard) => Err((
            format!("method `{method}` is not in upper case"),
            format!("write `{standard}`: methods are case-sensitive"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_literals_parameters_and_a_rest() {
        assert_eq!(parse_path("/"), Ok(vec![]));
        assert_eq!(
            parse_path("/users/{id}/{*rest}"),
            Ok(vec![
                PatternSegment::Literal("users"),
                PatternSegment::Parameter("id"),
                PatternSegment::Rest("rest")
            ])
        );
    }

    #[test]
    fn path_that_could_never_match_is_refused_with_a_hint() {
        for (path, hint) in [
            ("login", "`/login`"),
            ("/login/", "`/login`"),
            ("//login", "`/login`"),
            ("/%6cogin", "`/login`"),
            ("/a;v=1", "`/a`"),
            ("/café", "`/caf%C3%A9`"),
            ("/a b", "`/a%20b`"),
            ("/a?b=1", "query"),
            ("/a%2fb", "400"),
            ("/../a", "400"),
            ("/{*rest}/a", "put it last"),
            ("/{*a}/{*b}", "put it last"),
            ("/{id}/{id}", "its own name"),
            ("/a{id}", "`/{name}`"),
            ("/{id}.png", "`/{name}`"),
            ("/{}", "`/{name}`"),
            ("/{*}", "`/{name}`"),
            ("/{a", "`/{name}`"),
            (&"/a".repeat(65), "`/{*rest}`"),
            ("/*", "`/{*rest}`"),
            ("/api/**", "`/api/{*rest}`"),
            ("/api*", "`/{*rest}`"),
            ("/api/*/x", "`/api/{name}/x`"),
            ("/api/:id/x", "`/api/{id}/x`"),
            ("~ ^/api", "`/{*rest}`"),
            ("^/api/.*$", "`/{*rest}`"),
        ] {
            let (_, given) = parse_path(path).expect_err(path);
            assert!(given.contains(hint), "{path}: {given}");
        }
    }

    #[test]
    fn signs_that_are_literal_can_still_be_written() {
        for path in ["/v1/jobs:batch", "/%2A", "/%3Aid", "/a*b", "/:", "/~me"] {
            assert!(parse_path(path).is_ok(), "{path}");
        }
    }

    #[test]
    fn method_in_lower_case_is_refused() {
        let lower = Method::from_bytes(b"post").expect("a token");
        let (_, hint) = check_method(&lower).expect_err("would never match");
        assert!(hint.contains("`POST`"));
        for method in [Method::POST, Method::from_bytes(b"purge").expect("a token")] {
            assert_eq!(check_method(&method), Ok(()));
        }
    }
}
