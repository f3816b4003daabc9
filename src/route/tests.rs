//! Precedence and collisions of routes, and a comparison of the table with a slow, simple matcher.

use proptest::prelude::*;

use super::*;

/// `"HOSTS PATH METHODS"`: comma-separated lists, `-` for an empty one.
fn pattern(text: &str) -> Pattern {
    let mut words = text.split(' ');
    let mut word = || words.next().expect("three words");
    let list = |word: &str| {
        word.split(',')
            .filter(|item| *item != "-")
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (hosts, path, methods) = (list(word()), word().to_owned(), list(word()));
    let methods = methods
        .iter()
        .map(|name| Method::from_bytes(name.as_bytes()).expect("a token"))
        .collect();
    Pattern {
        hosts,
        path,
        methods,
    }
}

fn table(patterns: &[&str]) -> RouteTable {
    RouteTable::build(
        &patterns
            .iter()
            .map(|text| pattern(text))
            .collect::<Vec<_>>(),
    )
    .expect("the patterns are valid")
}

fn errors(patterns: &[&str]) -> Vec<RouteError> {
    RouteTable::build(
        &patterns
            .iter()
            .map(|text| pattern(text))
            .collect::<Vec<_>>(),
    )
    .expect_err("the patterns are invalid")
}

fn route(table: &RouteTable, host: &str, path: &str, method: Method) -> Option<usize> {
    match table.find(&host::normalise(host), path, &method) {
        Found::Route(route, _) => Some(route),
        Found::WrongMethod(_) | Found::None => None,
    }
}

#[test]
fn more_specific_host_decides() {
    let table = table(&[
        "- / -",
        "*.example.com / -",
        "*.b.example.com / -",
        "a.b.example.com / -",
    ]);
    for (host, expected) in [
        ("a.b.example.com", 3),
        ("A.B.Example.Com:443", 3),
        ("a.b.example.com.", 3),
        ("x.b.example.com", 2),
        ("x.y.b.example.com", 2),
        ("b.example.com", 1),
        ("example.com", 0),
        ("notexample.com", 0),
        (".example.com", 0),
        ("", 0),
    ] {
        assert_eq!(
            route(&table, host, "/", Method::GET),
            Some(expected),
            "{host}"
        );
    }
}

#[test]
fn more_specific_path_decides() {
    let table = table(&[
        "- /{*rest} -",
        "- /users/{id} -",
        "- /users/me -",
        "- /users/{*rest} -",
        "- /users/{id}/posts -",
        "- /users -",
    ]);
    for (path, expected) in [
        ("/", 0),
        ("/other", 0),
        ("/users", 5),
        ("/users/me", 2),
        ("/users/7", 1),
        ("/users/7/posts", 4),
        ("/users/me/posts", 4),
        ("/users/7/likes", 3),
        ("/users/7/posts/1", 3),
    ] {
        assert_eq!(
            route(&table, "h", path, Method::GET),
            Some(expected),
            "{path}"
        );
    }
}

#[test]
fn rest_matches_its_own_root() {
    let table = table(&["- /files/{*rest} -"]);
    assert_eq!(route(&table, "h", "/files", Method::GET), Some(0));
    assert_eq!(route(&table, "h", "/files/a/b", Method::GET), Some(0));
    assert_eq!(route(&table, "h", "/filesystem", Method::GET), None);
}

#[test]
fn parameter_takes_exactly_one_segment() {
    let table = table(&["- /{id} -"]);
    assert_eq!(route(&table, "h", "/a", Method::GET), Some(0));
    for path in ["/", "/a/b"] {
        assert_eq!(route(&table, "h", path, Method::GET), None, "{path}");
    }
}

#[test]
fn less_specific_host_takes_what_the_specific_one_lacks() {
    let table = table(&["api.example /v1 -", "*.example /v2 -", "- /v3 -"]);
    for (path, expected) in [
        ("/v1", Some(0)),
        ("/v2", Some(1)),
        ("/v3", Some(2)),
        ("/v4", None),
    ] {
        assert_eq!(
            route(&table, "api.example", path, Method::GET),
            expected,
            "{path}"
        );
    }
}

#[test]
fn route_that_names_the_method_decides() {
    let table = table(&["- /login -", "- /login POST,PUT"]);
    assert_eq!(route(&table, "h", "/login", Method::POST), Some(1));
    assert_eq!(route(&table, "h", "/login", Method::PUT), Some(1));
    assert_eq!(route(&table, "h", "/login", Method::DELETE), Some(0));
}

#[test]
fn head_is_matched_as_get_unless_a_route_names_it() {
    let both = table(&["- /a GET", "- /a -", "- /b GET", "- /b HEAD"]);
    assert_eq!(route(&both, "h", "/a", Method::HEAD), Some(0));
    assert_eq!(route(&both, "h", "/b", Method::HEAD), Some(3));
    let fallback = table(&["- /a GET", "- /{*rest} HEAD"]);
    assert_eq!(route(&fallback, "h", "/a", Method::HEAD), Some(0));
}

#[test]
fn other_methods_go_on_to_a_less_specific_route() {
    let table = table(&["api.example /login POST", "- /{*rest} -"]);
    assert_eq!(route(&table, "api.example", "/login", Method::GET), Some(1));
    assert_eq!(
        route(&table, "api.example", "/login", Method::POST),
        Some(0)
    );
}

#[test]
fn wrong_method_lists_what_every_matching_route_allows() {
    let table = table(&["api.example /login POST", "- /{*rest} GET"]);
    let Found::WrongMethod(allow) = table.find("api.example", "/login", &Method::PUT) else {
        panic!("no route accepts PUT")
    };
    assert_eq!(allow, "GET, HEAD, POST");
    assert_eq!(
        table.find("api.example", "/login", &Method::GET),
        table.find("x", "/login", &Method::GET)
    );
}

#[test]
fn empty_table_finds_nothing() {
    assert_eq!(table(&[]).find("h", "/", &Method::GET), Found::None);
}

#[test]
fn parameters_are_named_by_the_route_that_decided() {
    let table = table(&["- /u/{id}/{*rest} GET", "- /u/{name}/{*tail} POST"]);
    let Found::Route(_, params) = table.find("h", "/u/7/a/b", &Method::GET) else {
        panic!("the first matches")
    };
    assert_eq!(
        (params.get("id"), params.get("rest"), params.get("name")),
        (Some("7"), Some("a/b"), None)
    );
    assert_eq!(
        params.iter().collect::<Vec<_>>(),
        [("id", "7"), ("rest", "a/b")]
    );
    let Found::Route(_, params) = table.find("h", "/u/7", &Method::POST) else {
        panic!("the second matches")
    };
    assert_eq!(
        (params.get("name"), params.get("tail")),
        (Some("7"), Some(""))
    );
}

#[test]
fn routes_that_nothing_sets_apart_collide() {
    for (first, second) in [
        ("- /a -", "- /a -"),
        ("- /{id} -", "- /{name} -"),
        ("- /a/{*x} GET", "- /a/{*y} POST,GET"),
        ("a.example,b.example / -", "c.example,B.example / -"),
        ("*.example / -", "*.EXAMPLE / -"),
    ] {
        let errors = errors(&["- /unrelated -", first, second]);
        assert_eq!(
            errors
                .iter()
                .map(|error| (error.index, error.other))
                .collect::<Vec<_>>(),
            [(2, Some(1))],
            "{first} | {second}"
        );
    }
}

#[test]
fn routes_that_something_sets_apart_do_not_collide() {
    table(&[
        "- /a -",
        "- /a GET",
        "- /a POST",
        "- /a HEAD",
        "- /{x} -",
        "- /{*x} -",
        "- / -",
        "a.example /a -",
        "*.example /a -",
    ]);
}

#[test]
fn every_problem_of_every_route_is_reported() {
    let errors = errors(&[
        "*,a.example.,b.example,B.example x get,GET,GET",
        "- /ok -",
        "- /ok -",
    ]);
    let found: Vec<_> = errors
        .iter()
        .map(|error| (error.index, error.other))
        .collect();
    assert_eq!(
        found,
        [
            (0, None),
            (0, None),
            (0, None),
            (0, None),
            (0, None),
            (0, None),
            (2, Some(1))
        ],
        "{errors:#?}"
    );
    assert!(
        errors
            .iter()
            .all(|error| !error.problem.is_empty() && !error.hint.is_empty())
    );
}

#[test]
fn ten_thousand_routes_each_find_themselves() {
    let patterns: Vec<Pattern> = (0..10_000)
        .map(|n| pattern(&format!("h{}.example /a{}/{{id}}/b{n} GET", n % 7, n % 100)))
        .collect();
    let table = RouteTable::build(&patterns).expect("the patterns are valid");
    for n in 0..10_000 {
        let (host, path) = (
            format!("h{}.example", n % 7),
            format!("/a{}/x/b{n}", n % 100),
        );
        assert_eq!(route(&table, &host, &path, Method::HEAD), Some(n));
    }
}

/// A slow, simple matcher: ranks every route that matches.
mod model {
    use std::cmp::Reverse;

    use super::*;

    fn host_rank(pattern: &Pattern, host: &str) -> Option<usize> {
        if pattern.hosts.is_empty() {
            return Some(0);
        }
        let rank = |text: &String| match text.strip_prefix('*') {
            Some(suffix) => {
                (host.len() > suffix.len() && host.ends_with(suffix)).then_some(suffix.len())
            }
            None => (text == host).then_some(usize::MAX),
        };
        pattern.hosts.iter().filter_map(rank).max()
    }

    /// For each segment: 3 for a literal, 2 for a parameter, 0 for a rest. The end ranks 1, because
    /// only a rest can match beyond it.
    fn path_rank(pattern: &str, path: &str) -> Option<Vec<u8>> {
        let split = |text: &str| {
            text.split('/')
                .filter(|segment| !segment.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let (wanted, given) = (split(pattern), split(path));
        let mut rank = Vec::new();
        for (at, segment) in wanted.iter().enumerate() {
            if segment.starts_with("{*") {
                rank.push(0);
                return Some(rank);
            }
            let actual = given.get(at)?;
            match segment.starts_with('{') {
                true => rank.push(2),
                false if segment == actual => rank.push(3),
                false => return None,
            }
        }
        rank.push(1);
        (wanted.len() == given.len()).then_some(rank)
    }

    fn method_rank(pattern: &Pattern, method: &Method) -> Option<u8> {
        if pattern.methods.contains(method) {
            return Some(2);
        }
        if *method == Method::HEAD && pattern.methods.contains(&Method::GET) {
            return Some(1);
        }
        pattern.methods.is_empty().then_some(0)
    }

    pub(super) fn find(
        patterns: &[Pattern],
        host: &str,
        path: &str,
        method: &Method,
    ) -> Option<usize> {
        let rank = |pattern: &Pattern| {
            Some((
                host_rank(pattern, host)?,
                path_rank(&pattern.path, path)?,
                method_rank(pattern, method)?,
            ))
        };
        let ranked = patterns
            .iter()
            .enumerate()
            .filter_map(|(index, pattern)| Some((rank(pattern)?, Reverse(index))));
        ranked.max().map(|(_, Reverse(index))| index)
    }

    /// Whether some route matches except for its method.
    pub(super) fn wrong_method(patterns: &[Pattern], host: &str, path: &str) -> bool {
        patterns.iter().any(|pattern| {
            host_rank(pattern, host).is_some() && path_rank(&pattern.path, path).is_some()
        })
    }
}

fn any_pattern() -> impl Strategy<Value = Pattern> {
    let host = prop::sample::select(vec!["a.x", "b.a.x", "x", "*.x", "*.a.x"]);
    let segment = prop::sample::select(vec!["a", "b", "{p}"]);
    let end = prop::sample::select(vec!["", "", "/{*r}"]);
    let method = prop::sample::select(vec![Method::GET, Method::HEAD, Method::POST]);
    let path = (prop::collection::vec(segment, 0..3), end).prop_map(|(segments, end)| {
        let parts = segments
            .iter()
            .enumerate()
            .map(|(at, segment)| format!("/{}", segment.replace('p', &format!("p{at}"))));
        let path = parts.collect::<String>() + end;
        if path.is_empty() {
            "/".to_owned()
        } else {
            path
        }
    });
    let unique = |mut hosts: Vec<&str>| {
        hosts.sort_unstable();
        hosts.dedup();
        hosts.into_iter().map(str::to_owned).collect()
    };
    (
        prop::collection::vec(host, 0..3).prop_map(unique),
        path,
        prop::option::of(method),
    )
        .prop_map(|(hosts, path, method)| Pattern {
            hosts,
            path,
            methods: method.into_iter().collect(),
        })
}

proptest! {
    #[test]
    fn table_agrees_with_the_obvious_matcher(candidates in prop::collection::vec(any_pattern(), 0..16)) {
        // keep only patterns that do not collide with earlier ones
        let mut patterns: Vec<Pattern> = Vec::new();
        for candidate in candidates {
            patterns.push(candidate);
            if RouteTable::build(&patterns).is_err() {
                patterns.pop();
            }
        }
        let table = RouteTable::build(&patterns).expect("only compatible patterns were kept");
        for host in ["a.x", "b.a.x", "c.b.a.x", "x", "y"] {
            for path in ["/", "/a", "/b", "/c", "/a/a", "/a/b", "/c/b", "/c/c", "/a/b/c"] {
                for method in [Method::GET, Method::HEAD, Method::POST, Method::PUT] {
                    let expected = model::find(&patterns, host, path, &method);
                    let found = table.find(host, path, &method);
                    match (&found, expected) {
                        (Found::Route(route, _), Some(expected)) => prop_assert_eq!(*route, expected, "{} {} {}", method, host, path),
                        (Found::WrongMethod(_), None) => prop_assert!(model::wrong_method(&patterns, host, path)),
                        (Found::None, None) => prop_assert!(!model::wrong_method(&patterns, host, path)),
                        _ => prop_assert!(false, "{method} {host} {path}: {found:?} but {expected:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn no_request_panics(host in "\\PC*", path in "\\PC*") {
        let table = table(&["- /{a}/{*b} GET", "*.x /{*r} -", "a.x / -"]);
        if let Found::Route(_, params) = table.find(&host, &path, &Method::GET) {
            let _ = format!("{params:?}");
        }
    }
}
