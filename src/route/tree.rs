//! The routes of one host pattern, as a tree of path segments.
//!
//! A general radix router (matchit) was rejected for three reasons. It does not accept `/{id}`
//! beside `/{*rest}`. It allocates while backtracking, which happens in any table with a catch-all.
//! And it stops at the first matching path, while tidegate continues to a less specific one if the
//! method does not match.
//!
//! An edge consumes exactly one segment, so a lookup visits each node at most once. It takes at
//! most one step per node within the path's depth, usually one per segment. The depth is bounded by
//! [`SEGMENTS_MAX`](super::pattern::SEGMENTS_MAX).

use std::{collections::BTreeMap, ops::ControlFlow};

use http::Method;

use super::pattern::PatternSegment;

/// The routes of one host pattern.
#[derive(Debug, Default)]
pub(super) struct Tree {
    root: Node,
}

#[derive(Debug, Default)]
struct Node {
    literals: BTreeMap<Box<str>, Node>,
    parameter: Option<Box<Node>>,
    /// Routes whose path ends at this node.
    end: Methods,
    /// Routes whose path ends at this node with `{*rest}`.
    rest: Methods,
}

/// Routes that share one path, by method.
#[derive(Debug, Default)]
pub(super) struct Methods {
    named: Vec<(Method, usize)>,
    any: Option<usize>,
}

impl Tree {
    /// Adds a route; no methods means any method. Fails with the earlier routes that have the same
    /// path and a common method, because neither is more specific. Such methods stay with the
    /// earlier route.
    pub(super) fn insert(
        &mut self,
        path: &[PatternSegment<'_>],
        methods: &[Method],
        route: usize,
    ) -> Result<(), Vec<usize>> {
        let mut node = &mut self.root;
        for segment in path {
            node = match *segment {
                PatternSegment::Literal(text) => node.literals.entry(text.into()).or_default(),
                PatternSegment::Parameter(_) => node.parameter.get_or_insert_default(),
                PatternSegment::Rest(_) => return node.rest.insert(methods, route),
            };
        }
        node.end.insert(methods, route)
    }

    /// Calls `visit` for every matching path, most specific first, until it breaks. `key_path`
    /// starts with `/` and has no empty segment; `/` alone has no segments.
    ///
    /// The first segment where two paths differ decides the order. A literal comes before a
    /// parameter, a parameter before a rest, and the end of a path before an empty rest.
    pub(super) fn visit<'t, B>(
        &'t self,
        key_path: &str,
        visit: &mut impl FnMut(&'t Methods) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let segments = key_path.strip_prefix('/').unwrap_or(key_path);
        self.root.visit(
            Some(segments).filter(|segments| !segments.is_empty()),
            visit,
        )
    }
}

impl Node {
    fn visit<'t, B>(
        &'t self,
        segments: Option<&str>,
        visit: &mut impl FnMut(&'t Methods) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        match segments {
            None => self.end.show(visit)?,
            Some(segments) => {
                let (segment, deeper) = match segments.split_once('/') {
                    Some((segment, deeper)) => (segment, Some(deeper)),
                    None => (segments, None),
                };
                if let Some(literal) = self.literals.get(segment) {
                    literal.visit(deeper, visit)?;
                }
                if let Some(parameter) = &self.parameter {
                    parameter.visit(deeper, visit)?;
                }
            }
        }
        self.rest.show(visit)
    }
}

impl Methods {
    fn insert(&mut self, methods: &[Method], route: usize) -> Result<(), Vec<usize>> {
        let mut taken = Vec::new();
        if methods.is_empty() {
            taken.extend(self.any);
            self.any.get_or_insert(route);
        }
        for method in methods {
            match self.named.iter().find(|(named, _)| named == method) {
                Some(&(_, other)) => taken.push(other),
                None => self.named.push((method.clone(), route)),
            }
        }
        taken.dedup();
        if taken.is_empty() { Ok(()) } else { Err(taken) }
    }

    fn show<'t, B>(
        &'t self,
        visit: &mut impl FnMut(&'t Methods) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if self.named.is_empty() && self.any.is_none() {
            ControlFlow::Continue(())
        } else {
            visit(self)
        }
    }

    /// The route for a method. If no route names HEAD, one for GET applies, so HEAD cannot evade a
    /// limit on GET. Otherwise a route for any method.
    pub(super) fn find(&self, method: &Method) -> Option<usize> {
        let named = |wanted: &Method| {
            self.named
                .iter()
                .find(|(named, _)| named == wanted)
                .map(|&(_, route)| route)
        };
        named(method)
            .or_else(|| {
                if method == Method::HEAD {
                    named(&Method::GET)
                } else {
                    None
                }
            })
            .or(self.any)
    }

    /// The routes that share the path. A route may occur more than once.
    pub(super) fn routes(&self) -> impl Iterator<Item = usize> {
        self.named.iter().map(|&(_, route)| route).chain(self.any)
    }

    /// The methods that routes name here; GET also yields HEAD.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let head = self
            .named
            .iter()
            .any(|(named, _)| named == Method::GET)
            .then_some("HEAD");
        self.named
            .iter()
            .map(|(named, _)| named.as_str())
            .chain(head)
    }
}
