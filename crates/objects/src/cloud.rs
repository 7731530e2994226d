//! Stores of clouds, by object_store. A call runs to its end on the thread that makes it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{Error, GetOptions, PutMode, PutOptions, PutPayload, RetryConfig};
use sluice_cache::remote::{ObjectStore, StoreError};
use tokio::runtime::Builder;

use crate::http::{Connector, within};

/// A call that failed is repeated once; whoever made it knows what to do without it.
const RETRIES: usize = 1;
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// A bucket, and a prefix in it.
#[derive(Debug)]
pub(crate) struct Cloud {
    store: Box<dyn object_store::ObjectStore>,
    prefix: String,
    url: String,
}

impl Cloud {
    pub fn open(scheme: &str, bucket: &str, prefix: &str, settings: &[(&str, &str)]) -> Result<Cloud> {
        if bucket.is_empty() {
            bail!("the store's URL has no bucket: {scheme}://BUCKET/PREFIX");
        }
        let retry = RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let store: Box<dyn object_store::ObjectStore> = if scheme == "gs" {
            let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry);
            for (key, value) in settings {
                builder = builder.with_config(key.to_lowercase().parse().context("a setting of the store")?, *value);
            }
            Box::new(builder.with_http_connector(Connector).build().context("the settings of the store")?)
        } else {
            // Whoever names an endpoint without TLS wants it.
            let mut builder =
                AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry).with_allow_http(true);
            for (key, value) in settings {
                builder = builder.with_config(key.to_lowercase().parse().context("a setting of the store")?, *value);
            }
            Box::new(builder.with_http_connector(Connector).build().context("the settings of the store")?)
        };
        let url = format!("{scheme}://{bucket}/{prefix}");
        Ok(Cloud { store, prefix: prefix.to_owned(), url: url.trim_end_matches('/').to_owned() })
    }

    fn path(&self, name: &str) -> Path {
        match self.prefix.is_empty() {
            true => Path::from(name),
            false => Path::from(format!("{}/{name}", self.prefix)),
        }
    }

    /// Runs a call. `None`: there is no such object.
    fn run<T>(
        &self,
        patience: Duration,
        most: u64,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<Option<T>, StoreError> {
        let runtime = Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|e| StoreError::Failed(e.to_string()))?;
        // Between two tries there is a pause, which the deadline of HTTP does not see.
        let done = within(patience, most, || runtime.block_on(async { tokio::time::timeout(patience, call).await }));
        match done {
            (Ok(Ok(value)), _) => Ok(Some(value)),
            (Ok(Err(Error::NotFound { .. })), _) => Ok(None),
            (Ok(Err(_)), Some(error)) => Err(error),
            (Err(_), _) => Err(StoreError::Timeout),
            (Ok(Err(e)), None) => Err(self.words(&e)),
        }
    }

    /// An error that HTTP knows nothing of, in words that name no credentials.
    fn words(&self, e: &Error) -> StoreError {
        match e {
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => StoreError::Denied("credentials".into()),
            Error::NotSupported { .. } | Error::NotImplemented { .. } => StoreError::Failed("not supported".into()),
            Error::AlreadyExists { .. } | Error::Precondition { .. } => StoreError::Failed("it exists".into()),
            _ => StoreError::Failed("no proper answer, or no credentials in the environment".into()),
        }
    }

    fn put_as(&self, name: &str, bytes: &[u8], mode: PutMode, patience: Duration) -> Result<bool, StoreError> {
        let (path, payload) = (self.path(name), PutPayload::from(bytes.to_vec()));
        let put = async {
            let options = PutOptions { mode, ..PutOptions::default() };
            match self.store.put_opts(&path, payload, options).await {
                Ok(_) => Ok(true),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
                Err(e) => Err(e),
            }
        };
        self.run(patience, 0, put)?.ok_or_else(|| StoreError::Failed("no such bucket".into()))
    }
}

impl ObjectStore for Cloud {
    fn url(&self) -> &str {
        &self.url
    }

    fn get(&self, name: &str, max: u64, patience: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path(name);
        let get = async {
            let got = self.store.get_opts(&path, GetOptions::default()).await?;
            let size = got.meta.size;
            if size > max {
                return Ok(Err(StoreError::TooLarge(size)));
            }
            Ok(Ok(Vec::from(got.bytes().await?)))
        };
        self.run(patience, max, get)?.transpose()
    }

    fn size(&self, name: &str, patience: Duration) -> Result<Option<u64>, StoreError> {
        let path = self.path(name);
        let options = GetOptions { head: true, ..GetOptions::default() };
        self.run(patience, 0, async { Ok(self.store.get_opts(&path, options).await?.meta.size) })
    }

    fn put(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<(), StoreError> {
        self.put_as(name, bytes, PutMode::Overwrite, patience).map(drop)
    }

    fn create(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<bool, StoreError> {
        match self.put_as(name, bytes, PutMode::Create, patience) {
            // A store without conditions: whoever is second at the same instant wins, and the other learns it at its next start.
            Err(StoreError::Failed(why)) if why == "not supported" || why == "HTTP 501" => {
                if self.size(name, patience)?.is_some() {
                    return Ok(false);
                }
                self.put(name, bytes, patience).map(|()| true)
            }
            done => done,
        }
    }

    fn list(
        &self,
        folder: &str,
        patience: Duration,
        take: &mut dyn FnMut(&str, u64) -> bool,
    ) -> Result<(), StoreError> {
        let path = self.path(folder);
        let skip = if self.prefix.is_empty() { 0 } else { self.prefix.len() + 1 };
        let list = async {
            let mut objects = self.store.list(Some(&path));
            while let Some(object) = objects.next().await {
                let object = object?;
                let name = object.location.as_ref();
                if name.get(skip..).is_some_and(|name| !take(name, object.size)) {
                    break;
                }
            }
            Ok(())
        };
        self.run(patience, 0, list).map(|_| ())
    }
}
