//! NCCL's structs as a C compiler lays them out, and our C header.
//!
//! `nccl_net_abi.json` and `nccl_tuner_abi.json` are the output of a C compiler for NCCL's own
//! headers, on x86-64 and on aarch64.

#![allow(dead_code, reason = "each test uses a part")]

use crate::common;
use serde_json::Value;
use std::collections::BTreeMap;

/// Layout of one of NCCL's structs. Numbers are in bytes.
pub struct Layout {
    pub size: usize,
    pub fields: Vec<Field>,
}

pub struct Field {
    pub name: String,
    pub offset: usize,
    pub size: usize,
}

/// Returns NCCL's structs by their names.
pub fn nccls_structs() -> BTreeMap<String, Layout> {
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let field = |value: &Value| Field {
        name: value["name"].as_str().unwrap().to_owned(),
        offset: number(&value["offset"]),
        size: number(&value["size"]),
    };
    let layout = |value: &Value| Layout {
        size: number(&value["size"]),
        fields: value["fields"]
            .as_array()
            .unwrap()
            .iter()
            .map(field)
            .collect(),
    };
    let read = |file: &str| -> BTreeMap<String, Value> {
        let text = std::fs::read_to_string(common::repository("tests/abi").join(file)).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let files = ["nccl_net_abi.json", "nccl_tuner_abi.json"];
    let structs = files.into_iter().flat_map(read);
    structs
        .map(|(name, value)| (name, layout(&value)))
        .collect()
}

/// Our C header, `include/nccl_net_spark.h`.
pub struct Header {
    pub structs: Vec<Struct>,
    text: String,
}

/// A struct of the form `typedef struct {`, one member per line, `} name;`.
#[derive(Clone)]
pub struct Struct {
    pub name: String,
    pub text: String,
    pub members: Vec<String>,
}

impl Header {
    pub fn read() -> Self {
        let text = std::fs::read_to_string(common::repository("include/nccl_net_spark.h")).unwrap();
        let blocks = text.split("typedef struct ").skip(1);
        let structs = blocks.map(Struct::parse).collect();
        Self { structs, text }
    }

    /// Returns the struct that `name` stands for: its own name, or a name that the header defines
    /// as another name of the struct.
    pub fn resolve<'a>(&'a self, name: &'a str) -> &'a str {
        let is_alias = |line: &&str| line.ends_with(&format!(" {name};"));
        let mut lines = self.text.lines();
        let alias = lines.find(|line| line.starts_with("typedef nccl") && is_alias(line));
        alias.map_or(name, |line| line.split(' ').nth(1).expect("a name"))
    }

    pub fn find(&self, name: &str) -> &Struct {
        let found = self.structs.iter().find(|one| one.name == name);
        found.unwrap_or_else(|| panic!("the header has no {name}"))
    }

    /// Returns the names of the tables that the library exports.
    pub fn tables(&self) -> Vec<&str> {
        let lines = self.text.lines();
        lines
            .filter(|line| line.starts_with("extern const "))
            .filter_map(|line| line.trim_end_matches(';').rsplit(' ').next())
            .collect()
    }
}

impl Struct {
    fn parse(block: &str) -> Self {
        let (body, rest) = block
            .split_once("\n}")
            .expect("a closing brace at the start of a line");
        let name = rest.split(';').next().expect("a name").trim().to_owned();
        let members = body
            .trim_start_matches('{')
            .split(';')
            .filter_map(member)
            .collect();
        Self {
            name,
            text: format!("{body}\n}}"),
            members,
        }
    }
}

/// Returns the name that a C declaration declares.
fn member(declaration: &str) -> Option<String> {
    let code = declaration.rsplit("*/").next()?.trim();
    let name = match code.split_once("(*") {
        Some((_, function)) => function.split(')').next()?,
        None => code.rsplit([' ', '*']).next()?.split('[').next()?,
    };
    (!name.is_empty()).then(|| name.to_owned())
}
