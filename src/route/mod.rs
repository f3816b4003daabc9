//! Core: finds the route of a request.
//!
//! Among the matching routes the most specific one wins, compared by host, then path, then method:
//! - an exact host, then `*.example.com` (the longest first), then any host,
//! - from left to right, a literal segment, then a parameter, then a rest,
//! - a route that names the method, then one for any method.
//!
//! If a route matches except for its method, the search continues with less specific routes. Two
//! routes that tie are an error when the table is built, so the order in the file never matters.

pub mod host;
pub mod path;
pub mod pattern;
mod tree;

use std::{collections::HashMap, fmt, ops::ControlFlow};

use http::{HeaderValue, Method};

pub use pattern::Pattern;

use host::HostPattern;
use pattern::PatternSegment;
use tree::{Methods, Tree};

/// All routes, indexed for lookup.
#[derive(Debug, Default)]
pub struct RouteTable {
    exact: HashMap<Box<str>, Tree>,
    below: HashMap<Box<str>, Tree>,
    any: Tree,
    /// The parameter names of each route.
    names: Vec<Box<[ParamName]>>,
}

/// A parameter of a route's path.
#[derive(Debug)]
struct ParamName {
    text: Box<str>,
    /// The number of segments before it.
    position: usize,
    /// It matches the rest of the path.
    is_rest: bool,
}

/// A route that the table cannot contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteError {
    /// The index of the pattern.
    pub index: usize,
    /// The index of the earlier pattern that it conflicts with.
    pub other: Option<usize>,
    /// The part of the pattern that is wrong.
    pub part: Part,
    /// The problem, as a clause without capital or full stop.
    pub problem: String,
    /// How to fix it.
    pub hint: String,
}

/// A part of a [`Pattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The host with this index.
    Host(usize),
    /// Its path.
    Path,
    /// The method with this index.
    Method(usize),
}

/// The result of a lookup.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'t, 'p> {
    /// The index of the matching pattern, and the values of its path parameters.
    Route(usize, Params<'t, 'p>),
    /// Routes match, but none for this method (405). Holds the value of `Allow`. Only this result
    /// allocates.
    WrongMethod(HeaderValue),
    /// No route matches (404).
    None,
}

/// The values of a route's path parameters in one request. Computed only when read.
#[derive(Clone, Copy)]
pub struct Params<'t, 'p> {
    names: &'t [ParamName],
    key_path: &'p str,
}

impl RouteTable {
    /// Validates and indexes the patterns. Returns every problem of every pattern. 10,000 patterns
    /// take tens of milliseconds.
    pub fn build(patterns: &[Pattern]) -> Result<RouteTable, Vec<RouteError>> {
        let mut table = RouteTable::default();
        let mut errors = Vec::new();
        for (index, pattern) in patterns.iter().enumerate() {
            table.add(index, pattern, patterns, &mut errors);
        }
        if errors.is_empty() {
            Ok(table)
        } else {
            Err(errors)
        }
    }

    fn add(
        &mut self,
        index: usize,
        pattern: &Pattern,
        patterns: &[Pattern],
        errors: &mut Vec<RouteError>,
    ) {
        let earlier = errors.len();
        let (segments, hosts) = parse(index, pattern, errors);
        self.names.push(names(&segments));
        if errors.len() > earlier {
            return;
        }

        let mut collisions = Vec::new();
        if hosts.is_empty() {
            collisions.extend(
                self.any
                    .insert(&segments, &pattern.methods, index)
                    .err()
                    .unwrap_or_default(),
            );
        }
        for host in hosts {
            let tree = match host {
                HostPattern::Exact(name) => self.exact.entry(name).or_default(),
                HostPattern::Below(name) => self.below.entry(name).or_default(),
            };
            collisions.extend(
                tree.insert(&segments, &pattern.methods, index)
                    .err()
                    .unwrap_or_default(),
            );
        }
        collisions.sort_unstable();
        collisions.dedup();
        errors.extend(collisions.into_iter().map(|other| RouteError {
            index,
            other: Some(other),
            part: Part::Path,
            problem: format!("path `{}` matches the same requests as path `{}` of an earlier route", pattern.path, patterns[other].path),
            hint: "neither is more specific: give them different hosts, paths or methods, or remove one".to_owned(),
        }));
    }

    /// Finds the route of a request.
    ///
    /// `host` comes from [`host::normalise`], `key_path` is
    /// [`NormalPath::key`](path::NormalPath::key).
    pub fn find<'t, 'p>(&'t self, host: &str, key_path: &'p str, method: &Method) -> Found<'t, 'p> {
        let host = host::for_lookup(host);
        let mut matched = false;
        let route = self.visit(host, key_path, |methods| {
            matched = true;
            methods
                .find(method)
                .map_or(ControlFlow::Continue(()), ControlFlow::Break)
        });
        match route {
            ControlFlow::Break(route) => Found::Route(
                route,
                Params {
                    names: &self.names[route],
                    key_path,
                },
            ),
            ControlFlow::Continue(()) if matched => {
                Found::WrongMethod(self.allowed(host, key_path))
            }
            ControlFlow::Continue(()) => Found::None,
        }
    }

    /// The parameter values of a route that [`find`](Self::find) returned for the same path.
    pub fn params<'t, 'p>(&'t self, route: usize, key_path: &'p str) -> Params<'t, 'p> {
        let names = &self.names[route];
        Params { names, key_path }
    }

    /// All routes for this host and path, most specific first, with any method. For `explain`;
    /// allocates.
    pub fn matching(&self, host: &str, key_path: &str) -> Vec<usize> {
        let mut routes = Vec::new();
        let _: ControlFlow<()> = self.visit(host::for_lookup(host), key_path, |methods| {
            routes.extend(methods.routes());
            ControlFlow::Continue(())
        });
        // a route with several methods is listed once per method, in a row
        routes.dedup();
        routes
    }

    /// All methods of matching routes, for `Allow` (RFC 9110 §10.2.1).
    fn allowed(&self, host: &str, key_path: &str) -> HeaderValue {
        let mut names: Vec<&str> = Vec::new();
        let _: ControlFlow<()> = self.visit(host, key_path, |methods| {
            names.extend(methods.names());
            ControlFlow::Continue(())
        });
        names.sort_unstable();
        names.dedup();
        HeaderValue::try_from(names.join(", "))
            .expect("methods are tokens, which are visible ASCII")
    }

    /// Calls `visit` with the methods of each matching host and path, most specific first, until it
    /// breaks.
    fn visit<'t, B>(
        &'t self,
        host: &str,
        key_path: &str,
        mut visit: impl FnMut(&'t Methods) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if let Some(tree) = self.exact.get(host) {
            tree.visit(key_path, &mut visit)?;
        }
        if !self.below.is_empty() {
            for tree in host::parents(host).filter_map(|parent| self.below.get(parent)) {
                tree.visit(key_path, &mut visit)?;
            }
        }
        self.any.visit(key_path, &mut visit)
    }
}

/// The segments of the path, and the hosts. Reports what is wrong with either, or with a method.
fn parse<'a>(
    index: usize,
    pattern: &'a Pattern,
    errors: &mut Vec<RouteError>,
) -> (Vec<PatternSegment<'a>>, Vec<HostPattern>) {
    let mut wrong = |part, (problem, hint)| {
        errors.push(RouteError {
            index,
            other: None,
            part,
            problem,
            hint,
        })
    };
    let twice = |what: &str, text: &dyn fmt::Display| {
        let problem = format!("{what} `{text}` is listed twice");
        (problem, "list it once".to_owned())
    };
    let segments = pattern::parse_path(&pattern.path).unwrap_or_else(|error| {
        wrong(Part::Path, error);
        Vec::new()
    });
    for (place, method) in pattern.methods.iter().enumerate() {
        if pattern.methods[..place].contains(method) {
            wrong(Part::Method(place), twice("method", method));
        }
        pattern::check_method(method).unwrap_or_else(|error| wrong(Part::Method(place), error));
    }
    let mut hosts = Vec::with_capacity(pattern.hosts.len());
    for (place, text) in pattern.hosts.iter().enumerate() {
        match HostPattern::parse(text) {
            Ok(host) if hosts.contains(&host) => wrong(Part::Host(place), twice("host", text)),
            Ok(host) => hosts.push(host),
            Err(error) => wrong(Part::Host(place), error),
        }
    }
    (segments, hosts)
}

fn names(segments: &[PatternSegment<'_>]) -> Box<[ParamName]> {
    let name = |(position, segment): (usize, &PatternSegment<'_>)| match *segment {
        PatternSegment::Literal(_) => None,
        PatternSegment::Parameter(text) => Some(ParamName {
            text: text.into(),
            position,
            is_rest: false,
        }),
        PatternSegment::Rest(text) => Some(ParamName {
            text: text.into(),
            position,
            is_rest: true,
        }),
    };
    segments.iter().enumerate().filter_map(name).collect()
}

impl<'t, 'p> Params<'t, 'p> {
    /// The parameter's value: one segment, or for `{*rest}` the remaining path without its leading
    /// slash, which may be empty. `None` if the route has no such parameter.
    pub fn get(&self, name: &str) -> Option<&'p str> {
        self.names
            .iter()
            .find(|known| &*known.text == name)
            .map(|known| self.value(known))
    }

    /// All parameters and their values, from left to right.
    pub fn iter(&self) -> impl Iterator<Item = (&'t str, &'p str)> {
        self.names
            .iter()
            .map(|name| (&*name.text, self.value(name)))
    }

    fn value(&self, name: &ParamName) -> &'p str {
        // segment n starts after slash n, counted from zero
        let start = self
            .key_path
            .match_indices('/')
            .nth(name.position)
            .map_or(self.key_path.len(), |(slash, _)| slash + 1);
        let left = &self.key_path[start..];
        match left.find('/') {
            Some(end) if !name.is_rest => &left[..end],
            _ => left,
        }
    }
}

impl PartialEq for Params<'_, '_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Params<'_, '_> {}

impl fmt::Debug for Params<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests;
