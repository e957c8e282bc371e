"""Anthropic's /v1/messages: conversion of the body, the answer's blocks and events, errors."""
