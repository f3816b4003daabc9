//! Identifies the client of a request: its address, and its user if a credential verifies.

use std::{net::IpAddr, sync::Arc};

use http::HeaderMap;

use super::{
    address::{AddressStep, Chain},
    client::Client,
    credential::{
        ApiKeys, CertificateField, ClientCertificate, Credential, CredentialFault, OnInvalid, User,
        UserHeader, client_cert,
        jwt::{Jwt, KeyRing, KeysUrl, TokenWorkspace},
    },
    rejected::Rejected,
    settings::{IdentitySettings, UserSource},
    trusted::TrustedProxies,
};

/// Identifies clients: their address and their user.
#[derive(Debug)]
pub struct Identifier {
    chain: Chain,
    users: Vec<UserLookup>,
}

/// A [`UserSource`] compiled for lookup.
#[derive(Debug)]
enum UserLookup {
    ApiKey(ApiKeys),
    Jwt(Box<Jwt>),
    Header(UserHeader),
    ClientCert(CertificateField),
}

/// One step in finding the client, for `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityStep<'a> {
    /// A step towards the address.
    Address(AddressStep<'a>),
    /// A step towards the user.
    User {
        /// Index of the source in the configuration.
        place: usize,
        /// The result of that source.
        outcome: CredentialOutcome,
    },
}

/// Result of one user source. The texts are from [`Credential::faults`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialOutcome {
    /// The request carries no credential of this kind.
    Nothing,
    /// This kind of credential is accepted only from trusted proxies, and the peer is not one.
    NotFromHere,
    /// The credential does not verify and is ignored as configured.
    Ignored(&'static str),
    /// The credential does not verify: answer 401.
    Rejected(&'static str),
    /// The source names the user; later sources are not tried.
    Found,
}

impl Identifier {
    /// Compiles the settings; indexes the trusted networks.
    pub fn new(settings: &IdentitySettings) -> Identifier {
        let source = |(place, source): (usize, &UserSource)| match source {
            UserSource::Jwt(source) => UserLookup::Jwt(Box::new(Jwt::new(source, place))),
            UserSource::ApiKey {
                header,
                keys,
                invalid,
            } => UserLookup::ApiKey(ApiKeys {
                header: header.clone(),
                keys: keys.clone(),
                invalid: *invalid,
            }),
            UserSource::Header {
                header,
                tier_header,
            } => UserLookup::Header(UserHeader {
                user: header.clone(),
                tier: tier_header.clone(),
            }),
            UserSource::ClientCert(field) => UserLookup::ClientCert(*field),
        };
        Identifier {
            chain: Chain {
                source: settings.address_from.clone(),
                trusted: TrustedProxies::new(&settings.trusted_proxies),
                hops: settings.trusted_hops,
            },
            users: settings.users.iter().enumerate().map(source).collect(),
        }
    }

    /// Finds the client's address, and its user if a credential names one. Allocates only for a
    /// `Forwarded` value with backslashes or a token that is not cached. Costs one search in the
    /// trusted networks. An API key adds one SHA-256; a token adds one keyed hash, and a
    /// verification the first time.
    ///
    /// `certificate` is the peer's verified certificate. Behind a proxy it is the proxy's.
    pub fn identify<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a ClientCertificate>,
        headers: &'a HeaderMap,
        tokens: TokenWorkspace<'a>,
    ) -> Result<Client<'a>, Rejected> {
        self.identify_with(peer, certificate, headers, tokens, |_| ())
    }

    /// Like [`Identifier::identify`], but passes each step to `visit`.
    pub fn identify_with<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a ClientCertificate>,
        headers: &'a HeaderMap,
        tokens: TokenWorkspace<'a>,
        mut visit: impl FnMut(IdentityStep<'a>),
    ) -> Result<Client<'a>, Rejected> {
        let client = self.locate(peer, headers, |step| visit(IdentityStep::Address(step)));
        let rejected = |source, fault: CredentialFault| Rejected {
            client,
            source,
            kind: fault.label(),
        };
        for (place, source) in self.users.iter().enumerate() {
            let mut tried = |outcome| visit(IdentityStep::User { place, outcome });
            let found = match source {
                UserLookup::ApiKey(keys) => match (keys.user(headers), keys.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(CredentialOutcome::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(CredentialOutcome::Rejected(fault.label()));
                        rejected(keys.credential(), fault)
                    })?,
                },
                UserLookup::Jwt(jwt) => match (jwt.user(headers, tokens), jwt.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(CredentialOutcome::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(CredentialOutcome::Rejected(fault.label()));
                        rejected(Credential::Token, fault)
                    })?,
                },
                UserLookup::Header(_) if !client.peer_trusted => {
                    tried(CredentialOutcome::NotFromHere);
                    continue;
                }
                UserLookup::Header(header) => header.user(headers).map_err(|fault| {
                    tried(CredentialOutcome::Rejected(fault.label()));
                    rejected(Credential::Header, fault)
                })?,
                UserLookup::ClientCert(field) => match certificate {
                    Some(certificate) => {
                        client_cert::user(*field, certificate).map_err(|fault| {
                            tried(CredentialOutcome::Rejected(fault.label()));
                            rejected(Credential::ClientCert, fault)
                        })?
                    }
                    None => None,
                },
            };
            tried(found.map_or(CredentialOutcome::Nothing, |_| CredentialOutcome::Found));
            if let Some(User {
                name,
                tier,
                tenant,
                token,
            }) = found
            {
                return Ok(Client {
                    user: Some(name),
                    tier,
                    tenant,
                    token,
                    ..client
                });
            }
        }
        Ok(client)
    }

    /// The key sets to fetch from a URL, and the rings that use them. A ring is empty until its
    /// first fetch, and tokens for it are rejected.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.users.iter().filter_map(|source| match source {
            UserLookup::Jwt(jwt) => Some((jwt.url.as_ref()?, &jwt.keys)),
            UserLookup::ApiKey(_) | UserLookup::Header(_) | UserLookup::ClientCert(_) => None,
        })
    }

    /// Elements of the address list to the left of the first `seen` ones. For `explain`.
    pub fn unseen<'a>(&self, headers: &'a HeaderMap, seen: usize) -> Vec<&'a [u8]> {
        self.chain.unseen(headers, seen)
    }

    /// Finds only the client's address, and passes each step to `visit`.
    pub fn locate<'a>(
        &self,
        peer: IpAddr,
        headers: &'a HeaderMap,
        visit: impl FnMut(AddressStep<'a>),
    ) -> Client<'static> {
        let found = self.chain.resolve(peer, headers, visit);
        Client {
            address: found.client,
            peer_trusted: found.peer_trusted,
            doubt: found.doubt,
            ..Client::anonymous(found.peer)
        }
    }
}
