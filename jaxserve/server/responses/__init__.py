"""OpenAI's /v1/responses: conversion of the body, the output's items and events, kept responses."""
